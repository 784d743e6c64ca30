package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/flightlock/flightlock/internal/progress"
)

// measureAll runs the chosen bouts, round after round, and appends what each rival did to the raw
// file at once: what was measured is there whatever comes after.
func measureAll(ctx context.Context, cfg config, all []bout) error {
	bouts, err := chosen(all, cfg.only)
	if err != nil {
		return err
	}
	nodes := slices.MaxFunc(bouts, func(a, b bout) int { return cmp.Compare(a.Nodes, b.Nodes) }).Nodes
	s, err := openSite(nodes)
	if err != nil {
		return err
	}
	defer s.close()
	s.profile = cfg.profile
	out, err := openRaw(cfg)
	if err != nil {
		return err
	}
	defer out.close()
	env, err := readEnvironment(ctx, s, cfg)
	if err != nil {
		return err
	}
	if err := out.write(line{Environment: env}); err != nil {
		return err
	}
	bar := progress.New(os.Stderr)
	bar.Start(expectedOf(bouts, cfg.rounds))
	defer bar.Close()
	for round := range cfg.rounds {
		for _, b := range bouts {
			if err := measureBout(ctx, s, out, bar, b, round); err != nil {
				return err
			}
		}
	}
	return nil
}

// measureBout has all rivals of a bout do it, one after the other; another one begins in every
// round. A rival that fails is recorded with its error, and the others go on.
func measureBout(ctx context.Context, s *site, out *rawFile, bar *progress.Bar, b bout, round int) error {
	for i := range b.Rivals {
		name := b.Rivals[(i+round)%len(b.Rivals)]
		bar.Next(name+": "+b.id(), b.expected())
		rec, err := s.measure(ctx, b, name)
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "peers:", err)
			rec = record{Bout: b.id(), Rival: name, At: time.Now(), Error: err.Error()}
		}
		if err := out.write(line{Record: &rec}); err != nil {
			return err
		}
	}
	return nil
}

func expectedOf(bouts []bout, rounds int) (total time.Duration) {
	for _, b := range bouts {
		total += b.expected() * time.Duration(len(b.Rivals)*rounds)
	}
	return total
}
