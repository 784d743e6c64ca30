package app

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/flightlock/flightlock/examples/service/internal/variant"
	"golang.org/x/sync/errgroup"
)

// pageParts is how many items a page shows: that of its own number, and those after it.
const pageParts = 4

// newPages is the cache of pages, each of which fetches its items when it is loaded. A load waits for other
// loads here. It must do so with its own ctx, by which the Fetchers know who waits for whom, and pages come from
// items, never items from pages: loads that wait for each other in a ring end by an error at best.
func newPages(locks variant.Locker, items variant.Cache, prefix string, fresh time.Duration) (variant.Cache, error) {
	load := func(ctx context.Context, key string, _ int64) (string, error) {
		number, err := strconv.Atoi(strings.TrimPrefix(key, pageKey(prefix, "")))
		if err != nil {
			return "", fmt.Errorf("the key of a page: %w", err)
		}
		var parts [pageParts]string
		group, ctx := errgroup.WithContext(ctx)
		for i := range parts {
			group.Go(func() (err error) {
				parts[i], err = items.Fetch(ctx, itemKey(prefix, strconv.Itoa(number+i)))
				return err
			})
		}
		if err := group.Wait(); err != nil {
			return "", err
		}
		return strings.Join(parts[:], "\n"), nil
	}
	return locks.NewCache("pages", load, variant.CacheOptions{
		Fresh:       fresh,
		LoadTimeout: 8 * time.Second, // longer than an item's
		MaxLoads:    128,
	})
}

func pageKey(prefix, number string) string { return prefix + "page:" + number }
