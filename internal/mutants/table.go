package main

// An id begins with the rule that the mutant breaks: a claim of docs/guarantees.md, G18 for instance, or one
// of the rules by which these claims hold, S1 and so on, of the table "Rules of the protocol" of
// docs/design.md.
var mutants = []mutant{
	{
		id:     "S1-release-by-prefix",
		breaks: "owners are compared by prefix",
		file:   "lua/release.lua",
		old:    `local ours = holder == ARGV[4]`,
		new:    `local ours = type(holder) == 'string' and string.sub(holder, 1, #ARGV[4]) == ARGV[4]`,
	},
	{
		id:     "S1-undo-by-prefix",
		breaks: "an undo, a refresh and a short release compare owners by prefix",
		file:   "lua/ours.lua",
		old:    `if holder ~= ARGV[1] then`,
		new:    `if type(holder) ~= 'string' or string.sub(holder, 1, #ARGV[1]) ~= ARGV[1] then`,
	},
	{
		id:     "S1-acquire-by-prefix",
		breaks: "an acquire compares owners by prefix",
		file:   "lua/acquire.lua",
		old: `if holder ~= ARGV[4] then
  -- A contender`,
		new: `if string.sub(holder, 1, #ARGV[4]) ~= ARGV[4] then
  -- A contender`,
	},
	{
		id:     "S2-owner-twice",
		breaks: "an owner is used for two attempts",
		file:   "client.go",
		old:    `strconv.AppendUint(owner, c.seq.Add(1), 36)`,
		new:    `strconv.AppendUint(owner, c.seq.Add(1)/2, 36)`,
		sim:    true,
	},
	{
		id:     "S3-late-attempt",
		breaks: "an attempt that took too long is granted",
		file:   "internal/quorum/lease.go",
		old: `	case clock.Passed(clock.Now(), l.until):
		f := r.failureLocked()`,
		new: `	case false:
		f := r.failureLocked()`,
	},
	{
		id:     "S3-deadline-when-sent",
		breaks: "the deadline moves when a refresh is sent",
		file:   "internal/flight/lease.go",
		old: `	f.refreshing = true
`,
		new: `	f.refreshing = true
	f.until = clock.Later(f.until, now.Add(f.g.cfg.Nodes.Validity(t.ttl)))
	if f.cur != nil {
		f.cur.until = f.until
	}
`,
	},
	{
		id:     "S3-valid-until-timer",
		breaks: "a lock is valid until its timer goes off",
		file:   "internal/flight/ticket.go",
		old: `	case clock.Passed(now, t.until):
		return t.expiredLocked()`,
		new: `	case false && clock.Passed(now, t.until):
		return t.expiredLocked()`,
		sim: true,
	},
	{
		id:     "S3-no-drift",
		breaks: "a lease is valid for its whole ttl",
		file:   "internal/quorum/quorum.go",
		old: `	return ttl - time.Duration(float64(ttl)*q.DriftFactor) - fixedDrift
`,
		new: `	return ttl
`,
	},
	{
		id:     "S3-lost-lock-returns",
		breaks: "a lock that Err has called lost is valid again when the wall clock is set back",
		file:   "internal/flight/ticket.go",
		old: `	t.until = now.Add(clock.Left(now, t.until))
	t.f.armLocked(now)
`,
		new: `	_ = now
`,
	},
	{
		id:     "S3-sleep-unnoticed",
		breaks: "nobody looks whether the machine has slept",
		file:   "internal/flight/sleep.go",
		old: `	slept := ahead-w.ahead > minSleep
`,
		new: `	slept := false
`,
	},
	{
		id:     "S4-no-undo",
		breaks: "a failed attempt is not undone",
		file:   "internal/quorum/lease.go",
		old: `	for i := range l.entries { // which ignores those that were abandoned
		l.entries[i].Release(&s.places[i], nil, false, p)
	}
`,
		new: `	_, _ = p, s
`,
		sim: true,
	},
	{
		id:     "S1-attach-any-owner",
		breaks: "a detached lock is attached whoever has the key",
		file:   "lua/attach.lua",
		old:    "if not replaces and holder ~= ARGV[4] then\n",
		new:    "replaces = replaces or holder and holder ~= ARGV[4]\nif not replaces and holder ~= ARGV[4] then\n",
		sim:    true,
	},
	{
		id:     "S4-no-debt",
		breaks: "a release without an answer is forgotten",
		file:   "internal/node/debt.go",
		old: `	if d.closed || len(d.open) >= maxDebts {
`,
		new: `	if true {
`,
		sim: true,
	},
	{
		id:     "S4-first-answer-believed",
		breaks: "the first answer to a release is believed although its acquire may still be executed",
		file:   "internal/node/entry.go",
		old: `		switch e.answers++; e.answers {
		case 1:
			return debtSoon, true
		case 2:
			return debtSecond, true
		}
`,
		new: ``,
	},
	{
		id:     "S5-own-delay-blamed",
		breaks: "a node is blamed for what waits in this process",
		file:   "internal/link/session.go",
		old: `	if ok {
		s.put += more
`,
		new: `	if ok && false {
		s.put += more
`,
	},
	{
		id:     "S5-mute-server-not-suspended",
		breaks: "a server that does not answer is asked again and again",
		file:   "internal/link/session.go",
		old: `	if silent {
`,
		new: `	if silent && false {
`,
	},
	{
		id:     "S5-held-waits-behind",
		breaks: "a refresh of a lock that somebody has waits behind acquires that were not written yet",
		file:   "internal/node/request.go",
		old:    `	return (r.op == opRefresh || !e.emptyLocked()) &&`,
		new:    `	return false &&`,
	},
	{
		id:     "S6-refresh-shortens",
		breaks: "a refresh shortens a ttl",
		file:   "lua/refresh.lua",
		old:    `if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then`,
		new:    `if true then`,
		sim:    true,
	},
	{
		id:     "S6-acquire-shortens",
		breaks: "an acquire shortens a ttl",
		file:   "lua/acquire.lua",
		old: `if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[5]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
end
local top`,
		new: `redis.call('PEXPIRE', KEYS[1], ARGV[5])
local top`,
	},
	{
		id:     "S8-raise-of-any-key",
		breaks: "a raise that does not look whose the key is",
		file:   "lua/refresh.lua",
		old:    `-- include ours.lua`,
		new: `if tonumber(redis.call('GET', KEYS[2]) or 0) < tonumber(ARGV[3]) then
  redis.call('SET', KEYS[2], ARGV[3])
end
-- include ours.lua`,
	},
	{
		id:     "S8-smallest-counter",
		breaks: "the q-th largest counter instead of the largest",
		file:   "internal/quorum/round.go",
		old: `		top = max(top, rep.Counter)
`,
		new: `		if top == 0 || rep.Counter < top {
			top = rep.Counter
		}
`,
		sim: true,
	},
	{
		id:     "S9-reserve-without-counter",
		breaks: "tokens are reserved without a look at the counter",
		file:   "lua/raise.lua",
		old:    `c = math.max(c, top) + more`,
		new:    `c = top + more`,
	},
	{
		id:     "S9-reserved-are-given",
		breaks: "tokens that nodes have only reserved are given",
		file:   "internal/quorum/refresh.go",
		old: `	case agree:
`,
		new: `	case agree || true:
`,
	},
	{
		id:     "S10-old-counters",
		breaks: "a node with old data goes on from its old counters",
		file:   "lua/reserve.lua",
		old: `and c < ARGV[2] + block then
`,
		new: `and false then
`,
	},
	{
		id:     "S10-counter-from-zero",
		breaks: "a counter that is missing begins at 0",
		file:   "lua/reserve.lua",
		old: `  if c <= block then
`,
		new: `  if false then
`,
	},
	{
		id:     "S11-handoff-keeps-token",
		breaks: "a handoff keeps the token",
		file:   "internal/flight/lease.go",
		old: `	f.tokens.next++
`,
		new: `	if f.used == 0 {
		f.tokens.next++
	}
`,
		sim: true,
	},
	{
		id:     "S11-handoff-with-little-left",
		breaks: "a lease is handed over however little of it is left",
		file:   "internal/flight/lease.go",
		old: `	return !fresh && left < f.enoughLocked(t.ttl)
`,
		new: `	return !fresh && left < 0
`,
	},
	{
		id:     "S12-refreshed-while-idle",
		breaks: "a retained lease is refreshed while idle",
		file:   "internal/flight/lease.go",
		old: `		if f.retainLocked(now, linger) {
`,
		new: `		if f.retainLocked(now, linger) {
			l := f.lease
			f.deferLocked(func() {
				l.Refresh(f.attemptTTL, 0, f.g.cfg.NodeTimeout, false, func(g quorum.Grant, why *quorum.Failure) {
					f.refreshed(l, false, g, why)
				})
			})
`,
	},
	{
		id:     "S12-renewal-keeps-holder",
		breaks: "the renewal of a lease for waiters keeps a holder that hangs",
		file:   "internal/flight/lease.go",
		old: `		t.moveLocked(clock.Later(t.until, clock.Earlier(f.until, limit)), limit)
`,
		new: `		t.moveLocked(clock.Later(t.until, f.until), clock.Later(limit, f.until))
`,
	},
	{
		id:     "S13-ring-accepted",
		breaks: "a Ring is accepted as a node",
		file:   "internal/node/node.go",
		old: `		return nil, fmt.Errorf("%T cannot be a node", client)
`,
		new: `		n.name = fmt.Sprintf("%T", client)
`,
	},
	{
		id:     "S14-duplicate-awaited",
		breaks: "an attempt waits for a node that is noticed to be a duplicate",
		file:   "internal/quorum/round.go",
		old: `	r.replies[i] = rep
	ends :=`,
		new: `	if l.duplicateMask&(1<<i) == 0 {
		r.replies[i] = rep
	}
	ends :=`,
	},
	{
		id:     "S14-second-name-votes",
		breaks: "a server under a second name has a second vote",
		file:   "internal/quorum/round.go",
		old: `	duplicate := rep.Kind == node.Replayed // the owner is new to this node
`,
		new: `	duplicate := false
	if rep.Kind == node.Replayed {
		rep.Kind = node.Granted
	}
`,
	},
	{
		id:     "S15-repair-votes",
		breaks: "a repair is counted as a vote",
		file:   "internal/quorum/round.go",
		old: `	if rep.Kind == node.Granted || rep.Kind == node.Renewed {
`,
		new: `	if rep.Kind == node.Missing && r.op == "refresh" && !r.decided {
		rep = node.Reply{Kind: node.Renewed, Counter: r.floor}
		defer l.repair(i)
	}
	if rep.Kind == node.Granted || rep.Kind == node.Renewed {
`,
	},
	{
		id:     "S15-reply-of-another-call",
		breaks: "whatever comes behind a subscription is taken for its answer",
		file:   "internal/link/listen.go",
		old: `		return false, false
	case c.confirmed`,
		new: `		return true, true
	case c.confirmed`,
	},
	{
		id:     "S17-offer-of-former-epoch",
		breaks: "a node grants offers of the epoch before",
		file:   "lua/release.lua",
		old:    `(%S+) ') == name and offer or nil`,
		new:    `(%S+) ') and offer or nil`,
	},
	{
		id:     "S17-late-vote",
		breaks: "a vote counts however late its message comes",
		file:   "internal/quorum/offer.go",
		old:    `clock.Passed(now, begun.Add(MaxVoteAge))`,
		new:    `false`,
	},
	{
		id:     "S17-any-epoch-counts",
		breaks: "a grant of any node counts, whatever it has forgotten",
		file:   "internal/node/offer.go",
		old: `	return &Epoch{Name: name, State: EpochLost}
`,
		new: `	return nil
`,
	},
	{
		id:     "S17-release-in-any-epoch",
		breaks: "a release grants in any epoch",
		file:   "lua/release.lua",
		old:    `  votes = not changed`,
		new:    `  votes = true`,
	},
	{
		id:     "S17-grant-of-any-node",
		breaks: "a message about a grant counts from any node",
		file:   "internal/quorum/offer.go",
		old: `	if v.Node != i {
`,
		new: `	if false {
`,
	},
	{
		id:     "S17-link-that-has-not-booted",
		breaks: "a message about a grant counts on a link whose boot was refused",
		file:   "internal/node/watch.go",
		old:    `booted, open := s.votes.Load() == on, s.link.Session() == on`,
		new:    `booted, open := true, true`,
	},
	{
		id:     "S17-forged-message",
		breaks: "a message about a grant need not know the number that the poll had at its node",
		file:   "internal/quorum/offer.go",
		old:    `l.offer.First[i] = firstPoll()`,
		new:    `l.offer.First[i] = 0`,
	},
	{
		id:     "S18-valid-from-message",
		breaks: "a grant is valid from when its message comes",
		file:   "internal/quorum/offer.go",
		old:    `return begun.Add(l.q.Validity(min(v.Span, p.span)))`,
		new:    `return clock.Now().Add(l.q.Validity(min(v.Span, p.span)))`,
	},
	{
		id:     "S18-rejoined-from-message",
		breaks: "an offer that a release has brought is valid from when its message comes",
		file:   "internal/quorum/offer.go",
		old: `		return p.begun
`,
		new: `		return clock.Now()
`,
	},
	{
		id:     "S18-longest-vote",
		breaks: "a lease is valid as long as one of its votes",
		file:   "internal/quorum/offer.go",
		old:    `least = min(least, clock.Left(now, v.until))`,
		new:    `least = clock.Left(now, v.until)`,
	},
	{
		id:     "S19-lease-for-nobody-stays",
		breaks: "a lease that was granted for a caller that does not come stays",
		file:   "internal/flight/linger.go",
		old: `		f.returnAndDieLocked(o.lease)
	default:
`,
		new: `		_ = o
		fallthrough
	default:
`,
	},
	{
		id:     "S19-grant-to-nobody-stays",
		breaks: "a grant to nobody stays",
		file:   "internal/quorum/offer.go",
		old: `		q.returnGrant(i, v)
`,
		new: ``,
	},
	{
		id:     "S19-refreshed-grant-forgotten",
		breaks: "a grant that only a refresh has shown is forgotten",
		file:   "internal/node/entry.go",
		old:    `how != notSent && rep.Kind != Missing && rep.Kind != Held {`,
		new:    `false {`,
	},
	{
		id:     "S20-span-of-releaser",
		breaks: "a grant is kept as long as the one that releases says",
		file:   "lua/release.lua",
		old:    `redis.pcall('SET', KEYS[1], owner, 'PX', span)`,
		new:    `redis.pcall('SET', KEYS[1], owner, 'PX', ARGV[6])`,
		sim:    true,
	},
	{
		id:     "S21-used-after-validity",
		breaks: "a retained lease is used after its validity",
		file:   "internal/flight/retained.go",
		old: `	case left <= 0:
		f.releaseLocked()
	case left < f.enoughLocked(t.ttl), f.tokens.left() == 0:`,
		new: `	case f.tokens.left() == 0:`,
	},
	{
		id:     "S21-never-checked",
		breaks: "a lease that is used again and again is renewed without a check",
		file:   "internal/flight/lease.go",
		old:    `checks = checks || f.checksReuseLocked() || f.g.cfg.Rival != nil`,
		new:    `checks = checks || f.g.cfg.Rival != nil`,
	},
	{
		id:     "S20-left-and-registered-again",
		breaks: "an undo that is sent again registers a contender that has left",
		file:   "internal/node/request.go",
		old:    `case r.tries > 0: //`,
		new:    `case false: //`,
	},
	{
		id:     "S20-left-and-rejoins",
		breaks: "a release that is sent again has a contender that has left wait again",
		file:   "internal/node/request.go",
		old: `			if r.tries > 0 {
				p = p.behind()`,
		new: `			if false {
				p = p.behind()`,
	},
	{
		id:     "S21-end-of-link-unheard",
		breaks: "who watches does not hear that the link has ended",
		file:   "internal/node/watch.go",
		old: `	deliver(watches, Event{Kind: Unsubscribed})
`,
		new: `	_ = watches
`,
	},
	{
		id:     "S21-inbox-unconfirmed",
		breaks: "leases are retained although the inbox is not confirmed any more",
		file:   "internal/flight/retained.go",
		old: `	f.unmarkLocked()
	if f.phase == lingering && f.lease != nil {
`,
		new: `	if false {
`,
	},
	{
		id:     "S22-recall-ignored",
		breaks: "a recall is ignored",
		file:   "internal/flight/retained.go",
		old: `		f.shard().counts.recalled.Add(1)
		f.noteRecallLocked()
		f.releaseLocked()
`,
		new: `		f.shard().counts.recalled.Add(1)
`,
		sim: true,
	},
	{
		id:     "S22-given-after-recall",
		breaks: "a retained lease is given to a local caller after the recall",
		file:   "internal/flight/retained.go",
		old: `		f.noteRecallLocked()
		f.releaseLocked()
`,
		new: `		f.noteRecallLocked()
		f.lingerLocked(f.g.at(clock.Now().Add(10 * time.Millisecond))) // soon
`,
		sim: true,
	},
	{
		id:     "S22-recall-before-grant",
		breaks: "a lease whose recall came before the grant is retained",
		file:   "internal/flight/retained.go",
		old: `		f.mark = recalled
		return
`,
		new: `		return
`,
	},
	{
		id:     "S24-store-without-comparing",
		breaks: "a store compares no stamp",
		file:   "rediscache/store.lua",
		old:    `if stamp == '' or string.sub(stamp, 1, 24) ~= string.sub(ARGV[2], 1, 24) then`,
		new:    `if stamp == '' then`,
	},
	{
		id:     "S24-store-without-entry",
		breaks: "a store does not need the entry",
		file:   "rediscache/store.lua",
		old:    `if stamp == '' or string.sub(stamp, 1, 24) ~= string.sub(ARGV[2], 1, 24) then`,
		new:    `if stamp ~= '' and string.sub(stamp, 1, 24) ~= string.sub(ARGV[2], 1, 24) then`,
	},
	{
		id:     "S24-load-without-stamp-stored",
		breaks: "a load without a stamp is stored",
		file:   "fetch/load.go",
		old: `		case r.Data.scope.Stamp == "":
`,
		new: `		case r.Data.scope.Stamp == "":
			_, found, _, _ := call(b.part(nil, r), r.Context(), f.opts.LookupTimeout, "Lookup", f.store.Reserve)
			r.Data.loaded.Stamp = found[r.Key()].Stamp
			return false
		case false:
`,
	},
	{
		id:     "S24-plain-has-stamps",
		breaks: "a Store without stamps is taken for one that has lost them",
		file:   "fetch/store.go",
		old:    `const plainStamp = "plain"`,
		new:    `const plainStamp = ""`,
	},
	{
		id:     "S24-no-entry-no-stamp",
		breaks: "a lookup before a load makes no entry where there is none",
		file:   "fetch/load.go",
		old:    `"Lookup", f.store.Reserve)`,
		new:    `"Lookup", f.store.GetMany)`,
	},
	{
		id:     "S24-any-caller-joins",
		breaks: "any caller joins a flight",
		file:   "internal/coalesce/coalesce.go",
		old:    `return !s.Limited || came`,
		new:    `return true || came`,
	},
	{
		id:     "S24-invalidation-keeps-stamp",
		breaks: "Invalidate keeps the stamp",
		file:   "rediscache/invalidate.lua",
		old:    `'fl1:t' .. newStamp()`,
		new:    `'fl1:t' .. (string.match(stampOf(redis.call('GET', KEYS[1])), '.+') or newStamp())`,
	},
	{
		id:     "S24-invalidation-in-background",
		breaks: "Invalidate does not wait",
		file:   "rediscache/cache.go",
		old:    `return c.server.invalidate(ctx, some)`,
		new: `go c.server.invalidate(context.Background(), some)
		return nil`,
	},
	{
		id:     "S24-expire-keeps-stamp",
		breaks: "Expire keeps the stamp",
		file:   "rediscache/expire.lua",
		old:    `string.sub(stamp, 1, 16), ARGV[1], 0`,
		new:    `string.sub(stamp, 1, 16), string.sub(stamp, 17), 0`,
	},
	{
		id:     "S24-expire-keeps-tombstone",
		breaks: "Expire keeps the stamp of a key without a value",
		file:   "rediscache/expire.lua",
		old:    `'t' .. newStamp()`,
		new:    `'t' .. stamp`,
	},
	{
		id:     "G62-found-is-enough",
		breaks: "a Refresh takes what its run has found",
		file:   "fetch/refresh.go",
		old:    `return m.ends.CompareAndSwap(byAnyValue, wasFound)`,
		new:    `return true`,
	},
	{
		id:     "G62-mark-lost",
		breaks: "a store removes a mark that came after its lookup",
		file:   "rediscache/store.lua",
		old: `  kind = kind == 'v' and 'r' or 't'
`,
		new: ``,
	},
	{
		id:     "G63-old-load-tagged",
		breaks: "a tag takes what was loaded before it was invalidated",
		file:   "rediscache/tag.lua",
		old:    `if tonumber(redis.call('ZSCORE', KEYS[1], '') or 0) > tonumber(ARGV[2]) then`,
		new:    `if false then`,
	},
	{
		id:     "G63-no-new-generation",
		breaks: "no generation begins with an InvalidateTag",
		file:   "rediscache/tags.go",
		old:    `c.tags.generation(ctx, true)`,
		new:    `c.tags.generation(ctx, false)`,
	},
	{
		id:     "G63-callers-have-stamps",
		breaks: "a caller has the stamp of an entry that has no tags yet",
		file:   "rediscache/store.go",
		old:    `c.opts.Tags != nil && !toLoad {`,
		new:    `false {`,
	},
	{
		id:     "G63-left-though-added",
		breaks: "a key leaves its tag, though it was added again",
		file:   "rediscache/leave.lua",
		old:    `== tonumber(ARGV[i + 1])`,
		new:    `~= 0`,
	},
	{
		id:     "G63-stored-before-tagged",
		breaks: "a value is stored before it is added to its tags",
		file:   "rediscache/store.go",
		old: `	outdated, failed := c.tags.add(ctx, ws)
	ws = maps.Clone(ws)
	maps.DeleteFunc(ws, func(key string, _ *writing) bool { return outdated[key] || failed[key] != nil })
	stored, notPut := c.server.put(ctx, ws)
`,
		new: `	stored, notPut := c.server.put(ctx, ws)
	outdated, failed := c.tags.add(ctx, ws)
	ws = maps.Clone(ws)
	maps.DeleteFunc(ws, func(key string, _ *writing) bool { return outdated[key] || failed[key] != nil })
`,
	},
	{
		id:     "G63-tier-keeps-tagged",
		breaks: "the tier keeps what has an invalidated tag",
		file:   "rediscache/tags.go",
		old:    `	defer c.tier.Clear()`,
		new:    ``,
	},
	{
		id:     "G63-clear-leaves-stamps",
		breaks: "Clear leaves the stamps of loads that are under way",
		file:   "rediscache/clear.lua",
		old:    `0, 3) == 'fl1:'`,
		new:    `0, 4) == 'fl1:v'`,
	},
	{
		id:     "S24-tier-keeps",
		breaks: "the tier keeps what was invalidated",
		file:   "rediscache/cache.go",
		old: `	for _, key := range keys {
		c.tier.Remove(key)
	}
	return c.repeat(ctx, op, failed)
`,
		new: `	return c.repeat(ctx, op, failed)
`,
	},
	{
		id:     "S24-tier-takes-old-read",
		breaks: "the tier takes what was read before that",
		file:   "internal/hot/hot.go",
		old:    `if s.removed.Load() != r.removed || old`,
		new:    `if old`,
	},
	{
		id:     "S24-tier-age-from-entry",
		breaks: "an age begins when the value enters the tier",
		file:   "internal/hot/hot.go",
		old:    `from: r.from, ttl`,
		new:    `from: now, ttl`,
	},
	{
		id:     "S24-tier-not-cleared",
		breaks: "a new connection that hears of changes keeps what was there before",
		file:   "rediscache/hearing.go",
		old: `	h.tier.Clear()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.on, h.refused = true, err
`,
		new: `	h.mu.Lock()
	defer h.mu.Unlock()
	h.on, h.refused = true, err
`,
	},
	{
		id:     "S24-pulse-counts-late",
		breaks: "what was heard of counts as of when the pulse was heard",
		file:   "rediscache/hearing.go",
		old:    `h.tier.Heard(sent)`,
		new:    `sent = clock.Now(); h.tier.Heard(sent)`,
	},
	{
		id:     "S24-heard-once",
		breaks: "who has heard of changes once is believed to go on",
		file:   "internal/hot/hot.go",
		old:    `return heard != nil && age(now, *heard) < unheard`,
		new:    `return heard != nil`,
	},
	{
		id:     "S24-change-not-heard",
		breaks: "the tier keeps what has changed elsewhere",
		file:   "rediscache/hearing.go",
		old:    `h.tier.Remove(key)`,
		new:    `_ = key`,
	},
	{
		id:     "S24-flush-not-heard",
		breaks: "the tier keeps what was flushed",
		file:   "rediscache/hearing.go",
		old: `		h.tier.Clear()
	}
`,
		new: `	}
`,
	},
	{
		id:     "S24-stale-in-tier",
		breaks: "a stale value stays in the tier, where nobody begins to load a new one",
		file:   "rediscache/store.go",
		old:    `return max(fresh, min(expires, time.Second))`,
		new:    `return max(fresh, expires)`,
	},
	{
		id:     "S24-loaded-in-tier",
		breaks: "a value that was loaded stays in the tier, though the server cannot tell of it",
		file:   "rediscache/store.go",
		old:    `return min(c.shortened(fresh, 1)+c.opts.Stale, time.Second)`,
		new:    `return c.shortened(fresh, 1) + c.opts.Stale`,
	},
	{
		id:     "S24-lookup-under-way-shared",
		breaks: "what a lookup before a load has found is for callers that came after it was sent",
		file:   "fetch/load.go",
		old: `		e, why := found[r.Key()], errorOf(err, r.Key())
`,
		new: `		e, why := found[r.Key()], errorOf(err, r.Key())
		r.Data.scope = f.sending()
`,
	},
	{
		id:     "S25-no-quarantine",
		breaks: "nodes that forgot vote at once",
		file:   "client.go",
		old:    `	return !c.opts.DisableQuarantine && `,
		new:    `	return false && `,
		sim:    true,
	},
	{
		id:     "S25-forgetful-confirms",
		breaks: "a node that has just lost its data confirms refreshes",
		file:   "internal/quorum/votes.go",
		old: `	if now == nil || now.Name != e.Name {
`,
		new: `	if true {
		return true
	} else if now == nil || now.Name != e.Name {
`,
	},
	{
		id:     "S25-restored-counts-as-kept",
		breaks: "a lock that was put back on a node counts as one that was never gone",
		file:   "internal/node/entry.go",
		old: `	return e.kept
`,
		new: `	return true
`,
	},
	{
		id:     "S25-first-INFO-believes",
		breaks: "the first that may ask INFO believes what was begun without",
		file:   "lua/boot.lua",
		old:    `or ran == '-' and (begun`,
		new:    `or false and (begun`,
	},
	{
		id:     "S25-hidden-process-votes",
		breaks: "a node that does not say whether it lost data votes",
		file:   "internal/node/epoch.go",
		old:    `if !anyMarker && (run == "" || why != "") {`,
		new:    `if false {`,
	},
	{
		id:     "S25-replica-votes",
		breaks: "a node that is no master votes",
		file:   "lua/boot.lua",
		old:    `if role ~= 'master' then`,
		new:    `if role == 'slave' then`,
	},
	{
		id:     "S25-start-ignored",
		breaks: "a process without run_id is told by its id alone",
		file:   "lua/boot.lua",
		old:    `math.abs(begun - ranBegun) <= 2`,
		new:    `true`,
	},
	{
		id:     "S25a-scripts-before-boot",
		breaks: "the scripts of the process before are loaded before boot.lua has answered",
		file:   "internal/node/epoch.go",
		old:    `	next, err := s.runBoot(on, establish, how)`,
		new: `	if e := s.epoch.Load(); e.Name != "" {
		s.missing.Or(uint32(votingOps))
		s.load(on, e, votingOps)
	}
	next, err := s.runBoot(on, establish, how)`,
	},
	{
		id:     "S25a-boot-dialled-again",
		breaks: "the connection on which boot.lua has answered is dialled again",
		file:   "internal/conn/options.go",
		old: `			return nil, errDialed
`,
		new: `			return dialAs(ctx, o.Network, o.Addr)
`,
	},
	{
		id:     "S25b-no-marker",
		breaks: "nobody looks at the marker",
		file:   "lua/epoch.lua",
		old: `marker or marker ~= ARGV[1]
`,
		new: `marker or false
`,
	},
	{
		id:     "S25c-attempt-without-limit",
		breaks: "an attempt may be decided at any time",
		file:   "internal/quorum/lease.go",
		old: `	case l.slowLocked():
`,
		new: `	case false && l.slowLocked():
`,
	},
	{
		id:     "S25c-no-process",
		breaks: "the closer look does not look for the process",
		file:   "lua/epoch.lua",
		old: `    changed = not says(run)
`,
		new: `    changed = false
`,
	},
	{
		id:     "S25c-marker-of-a-dump",
		breaks: "a marker from a dump is taken for this process'",
		file:   "lua/epoch.lua",
		old:    `changed = raw ~= '-' and redis.pcall(`,
		new:    `changed = false and redis.pcall(`,
	},
	{
		id:     "S25c-text-of-any-process",
		breaks: "a script that is sent as a text does not compare the process",
		file:   "internal/node/request.go",
		old:    ` || r.byText && in.epoch.process != ""; r.strict {`,
		new:    `; r.strict {`,
	},
	{
		id:     "S25c-promotion-ignored",
		breaks: "nobody looks when a server was last made a master",
		file:   "lua/epoch.lua",
		old:    `if promoted ~= '-' and not changed then`,
		new:    `if false then`,
	},
	{
		id:     "S25d-unestablished-votes",
		breaks: "a node's epoch need not be established for its votes to count",
		file:   "internal/quorum/votes.go",
		old:    `	return e.State == node.EpochKept || now != nil`,
		new:    `	return true || now != nil`,
		sim:    true,
	},
	{
		id:     "S25d-established-too-soon",
		breaks: "an epoch is established before its process could be told from the next",
		file:   "lua/boot.lua",
		old:    `not (byStart and second - begun < 5)`,
		new:    `true`,
	},
	{
		id:     "S25f-known-not-sent",
		breaks: "a client does not say that it knew a node which has no epoch now",
		file:   "internal/node/epoch.go",
		old: `		known = "1"
`,
		new: `		known = "0"
`,
		sim: true,
	},
	{
		id:     "S25f-known-not-written",
		breaks: "what a client knows of a node is not written there",
		file:   "lua/boot.lua",
		old: `  if state == 'new' and known then
`,
		new: `  if false then
`,
	},
	{
		id:     "G18-leaver-keeps-lease",
		breaks: "a waiter that leaves with the lease keeps it",
		file:   "internal/flight/leave.go",
		old: `		f.endLocked(t, released, nil)
		f.handOverOrReleaseLocked(clock.Now(), t.lingers())
	}
	return err
`,
		new: `		_ = clock.Now
	}
	return err
`,
	},
	{
		id:     "G29-within-gives-up-late",
		breaks: "Within gives up after twice its time",
		file:   "retry.go",
		old:    "max: math.MaxInt, within: d, not",
		new:    "max: math.MaxInt, within: 2 * d, not",
	},
	{
		id:     "G37-loaded-without-looking",
		breaks: "a load begins without a lookup under the lock",
		file:   "fetch/load.go",
		old:    `if r.Data.scope.Stamp = e.Stamp; e.Fresh != Fresh {`,
		new:    `if r.Data.scope.Stamp = e.Stamp; true {`,
	},
	{
		id:     "G37-locks-of-users",
		breaks: "the locks of Fetchers are those of users",
		file:   "client.go",
		old:    `prefix: fetchNamespace + c.opts.KeyPrefix}`,
		new:    `prefix: c.opts.KeyPrefix}`,
	},
	{
		id:     "G37-failure-not-reported",
		breaks: "a load that has failed is not reported to the processes that wait for it",
		file:   "fetch/batch.go",
		old:    `end = b.f.c.ReleaseFailed`,
		new:    `end = release`,
	},
	{
		id:     "G37-slow-lookup-is-outage",
		breaks: "one Lookup that times out is an outage of the cache",
		file:   "fetch/batch.go",
		old:    `maxSlowLookups = 3`,
		new:    `maxSlowLookups = 1`,
	},
	{
		id:     "G37-error-not-held",
		breaks: "the error of a load is not held for those that come next",
		file:   "fetch/failures.go",
		old:    `x.err, x.held, x.refresh = err, now.Add(fs.hold), `,
		new:    `x.err, x.held, x.refresh = err, now, `,
	},
	{
		id:     "G37-not-found-held",
		breaks: "that a key does not exist is a failure of its load",
		file:   "fetch/store.go",
		old:    `return errors.Is(err, ErrNotFound) })`,
		new:    `return false && errors.Is(err, ErrNotFound) })`,
	},
	{
		id:     "G37-lookups-without-limit",
		breaks: "all runs look up at once",
		file:   "fetch/fetch.go",
		old:    `const maxLookups = 64`,
		new:    `const maxLookups = 64_000`,
	},
	{
		id:     "G37-down-server-asked",
		breaks: "each caller asks a server of the cache that is down",
		file:   "rediscache/breaker.go",
		old:    `	if m.answered { // the failure`,
		new:    `	if true || m.answered { // the failure`,
	},
	{
		id:     "G37-burst-at-once",
		breaks: "the lookups of a burst wait for connections while their time passes",
		file:   "rediscache/server.go",
		old:    `ctx.Value(seam.OfRun{}) != nil {`,
		new:    `ctx.Value(seam.OfRun{}) != nil || true {`,
	},
	{
		id:     "G37-get-asks-for-commands",
		breaks: "a GET on a Cluster waits until go-redis has asked some master for its commands",
		file:   "rediscache/server.go",
		old: `	cmd.SetStepCount(1)
`,
		new: ``,
	},
	{
		id:     "G38-unlocked-without-limit",
		breaks: "MaxUnlockedLoads limits nothing",
		file:   "fetch/gate.go",
		old: `	if !locked {
`,
		new: `	if false {
`,
	},
	{
		id:     "G38-second-load-of-a-key",
		breaks: "a Load that ignores its ctx does not keep its key",
		file:   "fetch/load.go",
		old:    `	c.Wait(context.Background())`,
		new:    `	_ = c`,
	},
	{
		id:     "G38-load-waits-for-itself",
		breaks: "a Get inside a load waits for that load",
		file:   "fetch/fetch.go",
		old:    `slices.Contains(c.keys, key) {`,
		new:    `slices.Contains(c.keys, key) && false {`,
	},
	{
		id:     "G38-chain-of-one",
		breaks: "a Get knows only the innermost load that it is in",
		file:   "fetch/load.go",
		old:    `&chain{f, keys, chainOf(ctx)}`,
		new:    `&chain{f, keys, nil}`,
	},
	{
		id:     "G38-load-not-committed",
		breaks: "a load ends with those who began it",
		file:   "fetch/load.go",
		old:    `return !r.Commit() }`,
		new:    `return r.Context().Err() != nil }`,
	},
	{
		id:     "G93-load-without-permit",
		breaks: "a load has no permit",
		file:   "fetch/load.go",
		old:    `if !b.permit(&s) {`,
		new:    `if false && !b.permit(&s) {`,
	},
	{
		id:     "G93-permit-not-kept",
		breaks: "a permit is given back before the load",
		file:   "fetch/fleet.go",
		old:    `*s = append(*s, got...)`,
		new:    `got.leave()`,
	},
	{
		id:     "G38-inner-load-waits-for-slot",
		breaks: "a load that another load waits for needs a slot",
		file:   "fetch/caller.go",
		old:    `if w.run = r; inside != nil {`,
		new:    `if w.run = r; false {`,
	},
	{
		id:     "G38-load-ends-with-callers",
		breaks: "a load ends when its last caller has left",
		file:   "internal/coalesce/coalesce.go",
		old:    `r.callers == 0 && !r.committed && !r.background`,
		new:    `r.callers == 0 && !r.background`,
	},
	{
		id:     "G39-stored-after-loss",
		breaks: "a value is stored although its lock was lost",
		file:   "fetch/load.go",
		old: `		case l != nil && l.Err() != nil:
`,
		new: `		case l != nil && false:
`,
	},
	{
		id:     "G54-masters-share-a-clock",
		breaks: "the masters of a Cluster have one clock, and one health",
		file:   "rediscache/server.go",
		old:    `s.masters.Load(owner.Options().Addr)`,
		new:    `s.masters.Load(owner.Options().Addr[:0])`,
	},
	{
		id:     "G54-versions-share-entries",
		breaks: "the Versions of a Cache have the same entries",
		file:   "rediscache/options.go",
		old:    `[]string{o.Name, o.Version}`,
		new:    `[]string{o.Name}`,
	},
	{
		id:     "G54-key-of-a-version",
		breaks: "a Cache without a Version has entries of the others",
		file:   "rediscache/cache.go",
		old:    `c.opts.Version == "" && isVersion(key)`,
		new:    `false && isVersion(key)`,
	},
	{
		id:     "G54-expired-entry-served",
		breaks: "an entry is served after its time, because a lookup before a load has prolonged its key",
		file:   "rediscache/store.go",
		old: `	if now >= e.expires {
`,
		new: `	if false {
`,
	},
	{
		id:     "G55-holds-while-it-waits",
		breaks: "a batch waits for the locks of others before it loads with its own",
		file:   "fetch/batch.go",
		old: `			f.fork(b)
			won.load(s)
`,
		new: `			b.drive()
			won.load(s)
`,
	},
	{
		id:     "G55-one-key-fails-all",
		breaks: "one key that cannot be loaded fails all that are loaded with it",
		file:   "fetch/errors.go",
		old: `	if some, ok := err.(KeyErrors); ok { //nolint:errorlint // it, and not what is in it
`,
		new: `	if some, ok := err.(KeyErrors); ok && false {
`,
	},
	{
		id:     "G75-kill-late",
		breaks: "the command kills what ignores TERM when the lock is lost",
		file:   "cmd/flightlock/guard.go",
		old:    `killAt = time.Now().Add(g.ttl / 10)`,
		new:    `killAt = time.Now().Add(g.ttl)`,
	},
	{
		id:     "G75-term-late",
		breaks: "the command waits for the loss of the lock",
		file:   "cmd/flightlock/guard.go",
		old:    `left == 0 || left <= lastFifth(g.ttl) && exited != nil`,
		new:    `left == 0`,
	},
	{
		id:     "G75-first-process-only",
		breaks: "the command ends the first process of CMD only",
		file:   "cmd/flightlock/group_unix.go",
		old:    `syscall.Kill(-g.number, s.(syscall.Signal))`,
		new:    `syscall.Kill(g.number, s.(syscall.Signal))`,
	},
	{
		id:     "G75-release-before-the-last",
		breaks: "the command releases the lock when the first process has ended",
		file:   "cmd/flightlock/guard.go",
		old:    `if exited == nil && g.cmd.empty() {`,
		new:    `if exited == nil {`,
	},
	{
		id:     "G75-grant-not-refreshed",
		breaks: "the command begins with a lock that is valid for a moment",
		file:   "cmd/flightlock/job.go",
		old:    `for time.Until(l.Until()) < ttl/2 {`,
		new:    `for time.Until(l.Until()) < 0 {`,
	},
	{
		id:     "S27-one-reader-releases-all",
		breaks: "the first reader that leaves releases the key of all",
		file:   "lua/leave.lua",
		old:    `if last and tonumber(last) >= now then`,
		new:    `if false then`,
		sim:    true,
	},
	{
		id:     "S27-old-shares",
		breaks: "a key that is shared anew has the shares of before",
		file:   "lua/share.lua",
		old: `  redis.call('DEL', readers)
`,
		new: ``,
	},
	{
		id:     "S27-refresh-without-share",
		breaks: "a reader without a share refreshes those of others",
		file:   "lua/rrefresh.lua",
		old: `elseif held == shared then
  return 0
`,
		new: `elseif held == shared then
  keep(now + ARGV[2])
`,
	},
	{
		id:     "S27-join-in-any-epoch",
		breaks: "readers join on a node whose epoch they do not know",
		file:   "lua/rlock.lua",
		old:    `if held == shared and not changed and (mine or may_join()) then`,
		new:    `if held == shared and (mine or may_join()) then`,
	},
	{
		id:     "S27-readers-overtake",
		breaks: "readers join although a writer waits before them",
		file:   "lua/rlock.lua",
		old:    `if string.byte(name, -1) ~= 83 then`,
		new:    `if false then`,
	},
	{
		id:     "S27-writer-kept",
		breaks: "readers that wait keep the want of a writer that is gone",
		file:   "lua/rlock.lua",
		old:    `if type(lives) == 'number' and lives >= 0 then`,
		new:    `if false then`,
	},
	{
		id:     "S27-ttl-of-the-longest",
		breaks: "a key lives as long as the longest share that it had, and not as those that are left",
		file:   "lua/leave.lua",
		old: `    redis.call('PEXPIRE', KEYS[1], math.max(1, last - now))
`,
		new: ``,
	},
	{
		id:     "S27-upgrade",
		breaks: "a writer in the ctx of a reader is given the read lock",
		file:   "singleflight.go",
		old:    `if node.Shares(l.Owner()) {`,
		new:    `if false {`,
	},
	{
		id:     "S27-short-share",
		breaks: "a reader joins a lease however old it is",
		file:   "rlock.go",
		old:    `case age <= 2*window:`,
		new:    `case age <= valid:`,
	},
	{
		id:     "S27-hidden-writer",
		breaks: "a reader that waits hides a writer from the refreshes of readers",
		file:   "lua/confirm.lua",
		old:    `(last == '1' or string.byte(name, -1) ~= 83)`,
		new:    `true`,
	},
	{
		id:     "G76-no-look",
		breaks: "RecordLast does not look at the record",
		file:   "once/once.go",
		old:    `switch err := r.rdb.Get(ctx, r.key).Err(); {`,
		new:    `switch err := error(redis.Nil); {`,
	},
	{
		id:     "G77-record-last",
		breaks: "RecordFirst records the tick when fn has ended",
		file:   "once/once.go",
		old: `		if first, err := r.claim(ctx, valueOf(l)); !first || err != nil {
			return err
		}
`,
		new: `		if r.rdb.Get(ctx, r.key).Err() == nil {
			return nil
		}
		defer r.claim(ctx, valueOf(l))
`,
	},
}
