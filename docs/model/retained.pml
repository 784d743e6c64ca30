/*
 * Retained leases (Options.Linger): C clients that want one key of N nodes. After its last caller a client may keep
 * the lease, for its next caller; an acquire that meets it publishes a recall. Each rule can be removed, by
 * -DNO_VALIDITY and so on. README.md says how it is run, and what it has found.
 *
 * What it checks. Safety: no two callers hold the key at once (twoHolders); nobody is given a lease that was recalled
 * while nobody held it (givenAfterRecall), or of which half is gone (givenTooLate); a closed client retains
 * nothing (retainedAfterClose). Liveness (-DLIVE): a rival, the last client, does not wait for ever.
 *
 * Time is as in grants.pml: there is no clock. A client numbers the moments from which a validity may count, its
 * stamps; 1 is the oldest that is not over. After half of its validity a stamp is old; later it is over, for the client
 * and then for the nodes, which may let its key expire. So drift is allowed for, and a client may pause at any moment
 * for any time: it reads the clock where the code does, when a caller comes, and notices nothing before.
 *
 * The network is that of grants.pml too: what was sent may be executed at any later time, or never, and answers may be
 * lost. A recall is delivered at any time, any number of times, or never, until the owner that it names is over; after
 * that it has no effect. A key whose owner is over is as good as free. With -DLIVE requests, answers and recalls
 * arrive some time, once (unless -DDEAF: no recall does), and before the lease of who sent them is over; and a key
 * that is free is left to those that wait, which is what releases, turns and grants are for.
 *
 * Local callers come and go at any time, at most WAITERS queue. A caller that holds is that until its release or
 * until the validity is over. They share a slice, which here is one handoff.
 *
 * With -DLIVE the rival is a client that retains nothing. What else may be added:
 *   -DSTOPS     client 0 stops at some time: its callers, its alarm and its inbox, not its refreshes.
 *   -DONCE      the rival polls once, and after that only when it may be its turn: no recall may be missed. But the
 *               subscriptions of client 0 break, BREAKS times in all: what a node publishes is lost from then on, until
 *               client 0 has noticed and subscribed again. Leases do not end by time, and nobody queues.
 *   -DSAME      client 0 retains a lease as long as the same majority of nodes has confirmed its inbox; else as long as
 *               any has.
 */
#ifndef C
#define C 2
#endif
#ifndef N
#define N 1
#endif
#ifndef WAITERS
#define WAITERS 1
#endif
#ifndef BREAKS
#define BREAKS 2
#endif
#define STAMPS 2	/* of each client at a time */

#define FREE 0
#define ATTEMPT(c) (1 + 2 * (c))	/* the owner of c's attempt, */
#define LEASE(c) (2 + 2 * (c))		/* and of its lease, which was that */
#define OF(c, o) ((o) == ATTEMPT(c) || (o) == LEASE(c))
#define CLIENT(o) (((o) - 1) / 2)

#define BIT(i) (1 << (i))
#define ALL (BIT(N) - 1)
#define MAJORITY(v) (N == 1 && (v) || (v) == 3 || (v) >= 5)	/* of the nodes' bits */
#define RIVAL (C - 1)

/* nodes */
byte own[N];
byte stamp[N];	/* the last one of its client, when that got the key */
bool want[C];	/* waits for the key, as the nodes know */

/* clients */
mtype = { idle, acquiring, held, renewing, retained }
mtype at[C] = idle;	/* renewing: nobody holds the lease, whose renewal a caller waits for */
byte waiting[C];	/* callers that queue */
byte stamps[C];
byte old[C];		/* bits: of these stamps half is gone */
byte attemptK[C];	/* its stamp; 0: there is none */
byte votes[C];
byte refusals[C];
byte leaseK[C];		/* 0: there is no lease, or it is over */
byte refreshK[C];	/* 0: none is in progress */
byte confirmed[C];	/* by these nodes */
bool checks[C];		/* the refresh in progress names a rival if there is one, */
bool named[C];		/* and has */
bool marked[C];		/* the lease, or the attempt in progress, may be retained */
bool reused[C];		/* the lease was */
bool recalled[C];	/* a lease of this flight was */
bool met[C];		/* the flight has met rivals */
bool rival[C];		/* one waits now */
bool sliceOver[C];
bool closing[C];
bool closed[C];
byte recalls[C];	/* bits: of these nodes a recall is on its way to it */
#ifdef NO_S22
bool leaving[C];	/* the release of the retained lease was sent */
#endif
#ifdef STOPS
bool stopped;
#define RUNS(c) ((c) != 0 || !stopped)
#else
#define RUNS(c) true
#endif

/* How it is known what is wrong. */
bool recalledUnheld[C];	/* while nobody held it */
bool twoHolders, givenAfterRecall, givenTooLate, retainedAfterClose;
#define NEVER(what, cond) what = (cond); assert(!what)

#define OTHER(c, i) (((c) + (i)) % C)
#define OLD(c) (!leaseK[c] || (old[c] & BIT(leaseK[c])))
#define HOLDS(c) (at[c] == held)
#ifdef LIVE
#define LOST false
#define CAN(c, n) (own[n] == FREE && ((c) == RIVAL || !want[RIVAL]))
#else
#define LOST true	/* is what was sent, maybe; and chance decides how long a slice is, and who waits elsewhere */
#define CAN(c, n) (own[n] == FREE)
#endif
#if defined(LIVE) || defined(ONE)
#define RETAINS(c) ((c) == 0)
#ifdef ONCE
#define QUEUES(c) (at[c] == idle)
#else
#define QUEUES(c) ((c) == 0 || at[c] == idle)
#endif
#else
#define RETAINS(c) true
#define QUEUES(c) true
#endif

/* Inboxes. */
#ifdef DEAF
#define HEARS false
#else
#define HEARS true
#endif

#ifdef ONCE
mtype = { up, broken, down }	/* broken: the client has not noticed */
mtype inbox[N] = up;		/* of client 0 */
byte steady;			/* bits: nodes of which no message can have been lost since its attempt began */
byte breaks;
bool polled;			/* the rival has */
#define VIEW ((inbox[0] != down) + 2 * (inbox[1] != down) + 4 * (inbox[2] != down))
#define SUBSCRIBED(c) (MAJORITY(VIEW))
#ifdef SAME
#define CONFIRMED (MAJORITY(steady))
#else
#define CONFIRMED (MAJORITY(VIEW))
#endif
#define PUBLISHES(c, n) ((c) == 0 && inbox[n] == up)
#define FREEFOR(c, n) (own[n] == FREE || own[n] == ATTEMPT(c))
#define POLLS(c) ((c) != RIVAL || !polled || FREEFOR(c, 0) + FREEFOR(c, 1) + FREEFOR(c, 2) >= 2)
#else
#define SUBSCRIBED(c) true
#define PUBLISHES(c, n) true
#define POLLS(c) true
#endif

inline becomes(o, p) {
	if :: own[0] == o -> own[0] = p; stamp[0] = (p -> stamp[0] : 0) :: else fi;
#if N > 1
	if :: own[1] == o -> own[1] = p; stamp[1] = (p -> stamp[1] : 0) :: else fi;
	if :: own[2] == o -> own[2] = p; stamp[2] = (p -> stamp[2] : 0) :: else fi
#endif
}

/* dies has c's flight end, if nobody waits. */
inline dies(c) {
	at[c] = idle;
	marked[c] = false; recalls[c] = 0;
#ifdef ONCE
	stamps[c] = 0;
#endif
	if
	:: !waiting[c] -> met[c] = false; recalled[c] = false; rival[c] = false; want[c] = false
	:: else
	fi
}

inline noAttempt(c) {
	attemptK[c] = 0; votes[c] = 0; refusals[c] = 0;
	becomes(ATTEMPT(c), FREE);
	dies(c)
}

inline noRefresh(c) { refreshK[c] = 0; confirmed[c] = 0; checks[c] = false; named[c] = false }

inline release(c) {
	leaseK[c] = 0;
	noRefresh(c);
	reused[c] = false; rival[c] = false; sliceOver[c] = false; recalledUnheld[c] = false;
#ifdef NO_S22
	leaving[c] = false;
#endif
	becomes(LEASE(c), FREE);
	dies(c)
}

/* give has a caller hold the lease. */
inline give(c) {
	NEVER(givenAfterRecall, recalledUnheld[c]);
	at[c] = held;
	NEVER(twoHolders, HOLDS(OTHER(c, 1)) || C > 2 && HOLDS(OTHER(c, C - 1)))
}

inline handOver(c) { waiting[c]--; sliceOver[c] = !LOST; give(c) }

/* check: the refresh is to name who waits elsewhere. */
inline refresh(c, check) {
	stamps[c]++;
	refreshK[c] = stamps[c]; confirmed[c] = 0; checks[c] = check && !LOST; named[c] = false
}

/* A lease that was used again is checked by each renewal. */
#ifdef NO_CHECK
#define CHECKS(c) sliceOver[c]
#else
#define CHECKS(c) (sliceOver[c] || reused[c])
#endif

/* renew has a caller wait until the lease is renewed, or contend anew if that cannot be. */
inline renew(c, check) {
	if
	:: refreshK[c] -> at[c] = renewing
	:: !refreshK[c] && stamps[c] < STAMPS -> at[c] = renewing; refresh(c, check)
	:: !refreshK[c] && stamps[c] == STAMPS -> release(c)
	fi
}

#ifdef NO_CLOSE
#define KEEPS(c) (marked[c] && !OLD(c) && !met[c] && !recalled[c])
#else
#define KEEPS(c) (marked[c] && !OLD(c) && !met[c] && !recalled[c] && !closing[c])
#endif

/* ends follows when the caller that held the lease has released it. */
inline ends(c) {
	if
	:: waiting[c] && (LOST || sliceOver[c]) && rival[c] -> release(c)
	:: waiting[c] && (LOST || sliceOver[c]) && !rival[c] -> renew(c, true)
	:: waiting[c] && (LOST || !sliceOver[c]) && OLD(c) -> renew(c, CHECKS(c))
	:: waiting[c] && (LOST || !sliceOver[c]) && !OLD(c) -> handOver(c)
	:: !waiting[c] && KEEPS(c) ->
		at[c] = retained;
		NEVER(retainedAfterClose, closed[c])
	:: !waiting[c] && (!KEEPS(c) || LOST) -> release(c)
	fi
}

/* reuse gives the retained lease to a caller that has just come. */
inline reuse(c) {
	reused[c] = !LOST; sliceOver[c] = false;
	if
	:: !leaseK[c] ->
#ifdef NO_VALIDITY
		if :: stamps[c] < STAMPS -> stamps[c]++ :: else fi;
		leaseK[c] = stamps[c];	/* as if it were new */
		give(c)
#else
		waiting[c]++; release(c)
#endif
	:: leaseK[c] && OLD(c) ->
#ifdef NO_HALF
		NEVER(givenTooLate, true)
#else
		waiting[c]++; renew(c, CHECKS(c))
#endif
	:: leaseK[c] && !OLD(c) -> give(c)
#ifndef LIVE
	:: leaseK[c] && !OLD(c) -> waiting[c]++; renew(c, CHECKS(c))	/* its tokens are used up, or its ttl is longer */
#endif
	fi
}

/* recall follows when a recall of c's lease or attempt has arrived. */
inline recall(c) {
	if
	:: at[c] == acquiring ->
#ifndef NO_EARLY
		recalled[c] = true
#else
		skip
#endif
	:: at[c] == held ->
#ifndef NO_NEWS
		recalled[c] = true;
		if :: waiting[c] -> met[c] = true; rival[c] = true :: else fi
#else
		skip
#endif
	:: at[c] == renewing ->
		recalled[c] = true; recalledUnheld[c] = true;
#ifndef NO_PRIORITY
		release(c)
#endif
	:: at[c] == retained ->
#if defined(NO_RECALL)
		skip
#elif defined(NO_S22)
		recalled[c] = true; leaving[c] = true
#else
		recalledUnheld[c] = true; release(c)
#endif
	:: at[c] == idle
	fi
}

#define LESS(x) x = (x -> x - 1 : 0)

/* passes has c's oldest stamp be over. */
inline passes(c) {
	stamps[c]--;
	old[c] = (old[c] >> 1) & ~1;
	if :: OF(c, own[0]) -> LESS(stamp[0]) :: else fi;
#if N > 1
	if :: OF(c, own[1]) -> LESS(stamp[1]) :: else fi;
	if :: OF(c, own[2]) -> LESS(stamp[2]) :: else fi;
#endif
	if :: attemptK[c] == 1 -> noAttempt(c) :: else -> LESS(attemptK[c]) fi;
	if
	:: leaseK[c] == 1 && at[c] != retained -> release(c)	/* the lock of its caller is lost */
	:: leaseK[c] == 1 && at[c] == retained -> leaseK[c] = 0; noRefresh(c)	/* it has not noticed */
	:: leaseK[c] != 1 -> LESS(leaseK[c]); LESS(refreshK[c])
	fi
}

/* renewed follows when a majority has confirmed a refresh. */
inline renewed(c) {
	leaseK[c] = refreshK[c];
	if
	:: LOST || named[c] -> met[c] = true; rival[c] = true
	:: !named[c] && checks[c] -> sliceOver[c] = false
	:: !named[c] && !checks[c]
	fi;
	noRefresh(c);
	if
	:: at[c] == retained && met[c] -> release(c)
	:: at[c] == renewing && (!waiting[c] || OLD(c) || rival[c] && (LOST || sliceOver[c])) -> release(c)
	:: at[c] == renewing && waiting[c] && !OLD(c) && (LOST || !(rival[c] && sliceOver[c])) -> handOver(c)
	:: at[c] == held || at[c] == retained && !met[c]
	fi
}

/* What may happen between a client and a node. */
proctype line(byte c; byte n) {
	do
	/* An acquire is executed; its answer arrives, or is lost. */
#ifdef ONCE
#define ANSWERED(c, n) (own[n] == ATTEMPT(c))
	:: atomic { attemptK[c] && !((votes[c] | refusals[c]) & BIT(n)) && CAN(c, n) ->	/* later */
		own[n] = ATTEMPT(c); stamp[n] = stamps[c] }
#else
#define ANSWERED(c, n) (CAN(c, n) || own[n] == ATTEMPT(c))
#endif
	:: atomic { attemptK[c] && !((votes[c] | refusals[c]) & BIT(n)) && ANSWERED(c, n) ->
		own[n] = ATTEMPT(c); stamp[n] = stamps[c];
		if
		:: votes[c] = votes[c] | BIT(n);
			if
			:: MAJORITY(votes[c]) ->
				leaseK[c] = attemptK[c]; attemptK[c] = 0; votes[c] = 0; refusals[c] = 0;
				becomes(ATTEMPT(c), LEASE(c));
				want[c] = false; rival[c] = false; sliceOver[c] = false;
				waiting[c]--;
#ifdef ONCE
				polled = polled && c != RIVAL;
#endif
				give(c)
			:: else
			fi
		:: LOST
		fi }
	:: atomic { attemptK[c] && !((votes[c] | refusals[c]) & BIT(n)) && !(CAN(c, n) || own[n] == ATTEMPT(c)) ->
		want[c] = !LOST;
		if
		:: own[n] != FREE && PUBLISHES(CLIENT(own[n]), n) ->
			recalls[CLIENT(own[n])] = recalls[CLIENT(own[n])] | (LOST -> 1 : BIT(n))
		:: else
		fi;
		refusals[c] = (LOST -> 0 : refusals[c] | BIT(n)) }

	/* A refresh is. */
	:: atomic { refreshK[c] && own[n] == LEASE(c) && !(confirmed[c] & BIT(n)) ->
		stamp[n] = stamps[c];
		named[c] = named[c] || checks[c] && (want[OTHER(c, 1)] || C > 2 && want[OTHER(c, C - 1)]);
		if
		:: confirmed[c] = confirmed[c] | BIT(n);
			if :: MAJORITY(confirmed[c]) -> renewed(c) :: else fi
		:: LOST
		fi }
#ifndef LIVE
	/* A repair, or an acquire of the lease's owner that is late: no vote. */
	:: atomic { leaseK[c] && own[n] == FREE -> own[n] = LEASE(c); stamp[n] = stamps[c] }
#endif
	od
}

/* A client's flight makes an attempt. */
proctype contender(byte c) {
	do
	:: atomic { RUNS(c) && at[c] == idle && waiting[c] && stamps[c] < STAMPS && POLLS(c) ->
		stamps[c]++; attemptK[c] = stamps[c];
		at[c] = acquiring;
#ifdef ONCE
		if :: c == 0 -> steady = VIEW :: else -> polled = true fi;
#endif
		marked[c] = RETAINS(c) && SUBSCRIBED(c) && !met[c] && !recalled[c];
#ifndef LIVE
		if :: marked[c] = false :: true fi
#endif
		}
	/* It has failed. */
#ifdef LIVE
	:: atomic { attemptK[c] && (votes[c] | refusals[c]) == ALL -> met[c] = true; noAttempt(c) }
#else
	:: atomic { attemptK[c] -> met[c] = true; noAttempt(c) }
	:: atomic { refreshK[c] -> if :: at[c] == renewing -> release(c) :: else -> noRefresh(c) fi }
#endif
	od
}

/* Its callers come and go, */
proctype callers(byte c) {
	do
	:: atomic { RUNS(c) && at[c] == retained && !closing[c] -> reuse(c) }
	:: atomic { RUNS(c) && at[c] != retained && !closing[c] && waiting[c] < WAITERS && QUEUES(c) -> waiting[c]++ }
#ifdef LIVE
	:: atomic { RUNS(c) && c != RIVAL && waiting[c] && at[c] == held -> waiting[c]-- }
#else
	:: atomic { waiting[c] ->
		waiting[c]--;
		if
		:: !waiting[c] && at[c] == acquiring -> noAttempt(c)
		:: !waiting[c] && at[c] == idle -> dies(c)
		:: else
		fi }
#endif
	/* refresh the lock, or have it renewed, */
#ifndef ONCE
	:: atomic { RUNS(c) && RETAINS(c) && at[c] == held && !refreshK[c] && stamps[c] < STAMPS -> refresh(c, CHECKS(c)) }
#endif
#ifdef IDLE
	:: atomic { at[c] == retained && leaseK[c] && !refreshK[c] && stamps[c] < STAMPS -> refresh(c, false) }
#endif
	od
}

/* and release it. */
proctype holder(byte c) {
	do
	:: atomic { RUNS(c) && at[c] == held -> ends(c) }
	od
}

/* Retained leases end: the alarm comes, or there are too many; and recalls arrive. */
proctype retainer(byte c) {
	do
#ifdef LIVE
	:: atomic { RUNS(c) && at[c] == retained && OLD(c) -> release(c) }
#else
	:: atomic { at[c] == retained -> release(c) }
#endif
	od
}

proctype mail(byte c) {
	do
	:: atomic { RUNS(c) && HEARS && recalls[c] ->
#ifdef LIVE
		recalls[c] = 0;
#endif
		recall(c) }
#ifdef NO_S22
	/* The release of the retained lease is answered. */
	:: atomic { leaving[c] -> if :: at[c] == retained -> release(c) :: else -> leaving[c] = false fi }
#endif
	od
}

proctype closer(byte c) {
	closing[c] = true;
	atomic {
		closed[c] = true;
		waiting[c] = 0;
		if
		:: at[c] == retained -> release(c)
		:: at[c] == acquiring -> noAttempt(c)
		:: at[c] == idle -> dies(c)
		:: else
		fi }
	atomic { if :: at[c] == held -> release(c) :: true fi }
}

proctype clock(byte c) {
	do
#ifdef LIVE
	:: atomic { !attemptK[c] && stamps[c] && !(old[c] & BIT(1)) -> old[c] = old[c] | BIT(1) }
	:: atomic { !attemptK[c] && stamps[c] && (old[c] & BIT(1)) -> passes(c) }
#else
	:: atomic { stamps[c] && !(old[c] & BIT(1)) -> old[c] = old[c] | BIT(1) }
	:: atomic { stamps[c] > 1 && (old[c] & BIT(1)) && !(old[c] & BIT(2)) -> old[c] = old[c] | BIT(2) }
	:: atomic { stamps[c] && (old[c] & BIT(1)) -> passes(c) }
#endif
	od
}

proctype node(byte n) {
	do
	:: atomic { own[n] && !stamp[n] -> own[n] = FREE }
#ifdef NO_S22
	:: atomic { leaving[0] && own[n] == LEASE(0) -> own[n] = FREE; stamp[n] = 0 }
#endif
	od
}

#ifdef ONCE
proctype subscription(byte n) {
	do
	:: atomic { inbox[n] == up && breaks < BREAKS ->
		breaks++; inbox[n] = broken; recalls[0] = recalls[0] & ~BIT(n) }
	:: atomic { inbox[n] == broken ->
		inbox[n] = down; steady = steady & ~BIT(n);
		if
#ifdef NO_UNMARK
		:: true
#else
		:: CONFIRMED
		:: !CONFIRMED -> marked[0] = false; if :: at[0] == retained -> release(0) :: else fi
#endif
		fi }
	:: atomic { inbox[n] == down -> inbox[n] = up }
	od
}
#endif

#ifdef STOPS
proctype stop() { stopped = true }
#endif

#ifdef LIVE
#define WAITS (waiting[RIVAL] && at[RIVAL] != held)
never {
	do
	:: true
	:: WAITS -> break
	od;
accept:
	do
	:: WAITS
	od
}
#endif

#ifdef ONCE
#define RUN(c) run line(c, 0); run contender(c); run callers(c); run holder(c)
#else
#define RUN(c) run line(c, 0); run contender(c); run callers(c); run holder(c); run clock(c)
#endif

init {
	atomic {
		RUN(0); RUN(1); run node(0);
#if N > 1
		run line(0, 1); run line(0, 2); run line(1, 1); run line(1, 2); run node(1); run node(2);
#endif
		run retainer(0); run mail(0);
#if !defined(LIVE) && !defined(ONE)
		run retainer(1); run mail(1);
#endif
#ifdef CLOSE
		run closer(0);
#endif
#if C > 2
		RUN(2);
#ifndef ONE
		run retainer(2); run mail(2);
#endif
#endif
#ifdef ONCE
		run subscription(0); run subscription(1); run subscription(2);
#endif
#ifdef STOPS
		run stop();
#endif
	}
}
