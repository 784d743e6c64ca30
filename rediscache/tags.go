package rediscache

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/flightlock/flightlock/internal/node"
)

// tags are those of the values of a Cache, each of them a set of keys in Redis (see tag.lua). A hit does not
// look at them: an InvalidateTag invalidates the entries of the keys.
//
//	load:           generation -> origin -> add the key to the tags -> store, if the stamp is still the same
//	InvalidateTag:  next generation -> the tag was invalidated in it -> invalidate each of its keys
//
// A load that began before the next generation either adds its key before the tag is invalidated: then the
// key is among those whose entries get another stamp, so that it is not stored, or not for long. Or it comes
// later, and its tag refuses it. One that began in the next generation sees what the origin has since
// InvalidateTag was called.
//
// Who comes to this process after an InvalidateTag may find the stamp of a load from before, which had no
// tags yet, and must not have its value. So callers of a Cache with tags have no stamps: see fetch.Fetcher's
// scopes.
//
// It is a server of its own, for its keys have another prefix; that of the generation is the prefix.
type tags struct{ *server }

const (
	maxTags    = 32  // of a value
	longestTag = 512 // in bytes

	// perTag is how many keys of a tag one script call has, which bounds for how long other commands wait.
	perTag = 200
)

// tagPrefix is what stands before each tag of a Cache. Its length is there because a tag may contain
// anything.
func tagPrefix(prefix string) string {
	return node.Reserved + "tag:" + strconv.Itoa(len(prefix)) + ":" + prefix
}

func checkTags(names []string) error {
	for _, tag := range names {
		switch {
		case tag == "":
			return invalid("tag", "empty", "a tag needs a name")
		case len(tag) > longestTag || !utf8.ValidString(tag):
			return invalid("tag", fmt.Sprintf("%.*q", longestTag, tag),
				fmt.Sprintf("it must be UTF-8 of %d bytes at most", longestTag))
		}
	}
	return nil
}

// tagsOf are the tags of a value.
func (c *Cache[V]) tagsOf(key string, v V) ([]string, error) {
	if c.opts.Tags == nil {
		return nil, nil
	}
	names := c.opts.Tags(key, v)
	if len(names) > maxTags {
		return nil, invalid("Options.Tags", fmt.Sprintf("%d tags of %q", len(names), key),
			fmt.Sprintf("a value has %d at most", maxTags))
	}
	return names, checkTags(names)
}

// generation is the present one, or the next one, which begins then. 0 is before all others, if it is not
// known: what begins in it is not stored with a tag that was invalidated lately.
func (t tags) generation(ctx context.Context, next bool) (n int64, err error) {
	begins := map[bool]string{false: "0", true: "1"}[next]
	got, failed := run(ctx, t.server, generationScript, []string{""}, t.lookups,
		func(string) []any { return []any{begins} }, func(_ string, reply any) (int64, error) {
			text, _ := reply.(string)
			n, ok := digits(text)
			if !ok {
				return 0, fmt.Errorf("flightlock: the cache replied %.100q to a request for a generation",
					fmt.Sprint(reply))
			}
			return n, nil
		})
	return got[""], failed[""]
}

// generation is that in which a load or a Set begins.
func (c *Cache[V]) generation(ctx context.Context) (n int64) {
	if c.opts.Tags != nil {
		n, _ = c.tags.generation(ctx, false) // 0 is safe
	}
	return n
}

// add adds what is to be stored to its tags, and returns what may not be stored with them, or could not be
// added.
func (t tags) add(ctx context.Context, ws map[string]*writing) (
	outdated map[string]bool, failed map[string]error) {
	outdated, failed = map[string]bool{}, map[string]error{}
	for some := range slices.Chunk(slices.Collect(maps.Keys(ws)), perTag) {
		members := map[string][]string{} // by tag
		for _, key := range some {
			for _, tag := range ws[key].tags {
				members[tag] = append(members[tag], key)
			}
		}
		if len(members) == 0 {
			continue
		}
		args := make(map[string][]any, len(members)) // a call that is not waited for any more may still read them
		for tag, keys := range members {
			generation, list := ws[keys[0]].generation, []any{}
			for _, key := range keys {
				generation = min(generation, ws[key].generation)
				// The store may be executed as late as the stamp is there.
				list = append(list, key, millis(ws[key].expires)+millis(t.tombstone))
			}
			args[tag] = append([]any{generation, millis(t.tombstone)}, list...)
		}
		added, notAdded := run(ctx, t.server, tagScript, slices.Collect(maps.Keys(members)), t.writes,
			func(tag string) []any { return args[tag] },
			func(_ string, reply any) (bool, error) { return reply == int64(1), nil })
		for tag, keys := range members {
			for _, key := range keys {
				if err := notAdded[tag]; err != nil {
					failed[key] = err
				} else if !added[tag] {
					outdated[key] = true
				}
			}
		}
	}
	return outdated, failed
}

// InvalidateTag invalidates all values that have one of the tags (Options.Tags), in two round trips, and
// three for each 200 keys that have had the tag. What Redis remembers as not found has no tags. If it fails,
// old values may still be there: call it again. Errors: the server's; ErrInvalid for a bad tag, or without
// Options.Tags; ErrClosed.
func (c *Cache[V]) InvalidateTag(ctx context.Context, names ...string) error {
	if c.opts.Tags == nil {
		return invalid("Options.Tags", "nil", "InvalidateTag needs it")
	}
	if err := checkTags(names); err != nil {
		return err
	}
	if c.finished.Load() {
		return errClosed
	}
	if len(names) == 0 {
		return nil
	}
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	// which keys have the tags is known when their loads are stored, and they may be here before
	defer c.tier.Clear()
	generation, err := c.tags.generation(ctx, true)
	if err != nil {
		return tagFailed(ctx, names, err)
	}
	for some := range slices.Chunk(names, maxPipeline) {
		failed := c.tags.touch(ctx, untagScript, some, generation, millis(c.tags.tombstone))
		for _, err := range failed {
			return tagFailed(ctx, names, err)
		}
	}
	for _, tag := range names {
		if err := c.invalidateKeys(ctx, tag); err != nil {
			return tagFailed(ctx, names, err)
		}
	}
	return nil
}

func tagFailed(ctx context.Context, names []string, err error) error {
	return fmt.Errorf("flightlock: invalidate tag %q: some values may be left, call it again: %w", names[0],
		ofCaller(ctx, within(err)))
}

// invalidateKeys invalidates the entries of the keys that a tag has, all of which ZSCAN returns that are
// there from its beginning to its end.
func (c *Cache[V]) invalidateKeys(ctx context.Context, tag string) error {
	for cursor := uint64(0); ; {
		var list []string
		list, err := do(ctx, c.tags.server, c.tags.writes, func(ctx context.Context) (list []string, err error) {
			list, cursor, err = c.tags.rdb.ZScan(ctx, c.tags.prefix+tag, cursor, "", perTag).Result()
			return list, err
		})
		if err != nil {
			return err
		}
		for some := range slices.Chunk(list, 2*perTag) { // a small set comes as a whole
			var keys []string
			var members []any
			for pair := range slices.Chunk(some, 2) {
				if pair[0] != "" {
					keys, members = append(keys, pair[0]), append(members, pair[0], pair[1])
				}
			}
			if len(keys) == 0 {
				continue
			}
			if err := c.repeat(ctx, "invalidate", c.server.invalidate(ctx, keys)); err != nil {
				return err
			}
			for _, err := range c.tags.touch(ctx, leaveScript, []string{tag}, members...) {
				return err
			}
		}
		if cursor == 0 {
			return nil
		}
	}
}
