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

// newPages is the cache of pages. A page may show items that were cached for almost fresh, so what
// it shows may be twice that old.
//
// The load of a page fetches the page's items, so loads wait for other loads. Two rules make that
// safe. A load fetches with its own ctx, or one derived from it:
// by that a Fetcher knows which loads wait for which, and does not count them against MaxLoads.
// And pages are made of items, never items of pages, so loads cannot wait for each other in a ring.
func newPages(locks variant.Locker, items variant.Cache, prefix string,
	fresh time.Duration) (variant.Cache, error) {
	load := func(ctx context.Context, key string) (string, error) {
		number, err := strconv.Atoi(strings.TrimPrefix(key, pageKey(prefix, "")))
		if err != nil {
			return "", fmt.Errorf("key of a page: %w", err)
		}
		var parts [pageParts]string
		group, groupCtx := errgroup.WithContext(ctx)
		for i := range parts {
			group.Go(func() (err error) {
				parts[i], err = items.Fetch(groupCtx, itemKey(prefix, strconv.Itoa(number+i)))
				return err
			})
		}
		if err := group.Wait(); err != nil {
			if ctx.Err() != nil { // LoadTimeout is over
				return "", fmt.Errorf("%w: %w", errLate, err)
			}
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

// invalidate removes an item and then the pages that show it, in this order: a page that is loaded
// after its own invalidation finds the new item. After an error it has to be called again.
func (a *App) invalidate(ctx context.Context, id string) error {
	if err := a.items.Invalidate(ctx, itemKey(a.cfg.Prefix, id)); err != nil {
		return err
	}
	var pages []string
	if number, err := strconv.ParseUint(id, 10, 31); err == nil {
		for i := range min(uint64(pageParts), number+1) {
			pages = append(pages, pageKey(a.cfg.Prefix, strconv.FormatUint(number-i, 10)))
		}
	}
	if len(pages) == 0 { // an item without a number is on no page
		return nil
	}
	return a.pages.Invalidate(ctx, pages...)
}

func pageKey(prefix, number string) string { return prefix + "page:" + number }
