/*
 * The core of the protocol with grants, so abstract that every interleaving can be looked at: three nodes,
 * C clients that want one key. Each rule can be taken out, by -DNO_S15 and so on. README.md says how it is run,
 * and what it has found.
 *
 * What it checks: two clients never believe at once in a lease that is valid; tokens rise (-DTOKENS).
 *
 * Time. There is no clock, only what S3 and S18 leave of it. A client numbers the moments from which a validity
 * may count, its stamps: 1 is the oldest from which a span has not passed yet. Time passes for a client when that
 * is over: then 2 is 1, and so on; it may do so at any moment. What is of stamp 0 is valid no more. A node that has
 * given c the key when c's last stamp was s may let it expire when s is 0, not before: that is all that a relative
 * ttl says, with drift allowed for, since s began before the ttl did. So where a vote counts from its receipt, a
 * node may let the key expire while the client believes in it. At most STAMPS of a client are under way at a time;
 * there may be any number of them, one after the other, and of all that they are for.
 *
 * The network. Whatever was sent may be executed at any later time, any number of times, or never; and the same
 * goes for messages and answers. So nothing has to be remembered of requests:
 *   - Once an owner is over, a release of it may come at any time, and also a late acquire. On a node that is the
 *     same as a free key: it may go at any time, or be granted to another, and until then nothing happens.
 *   - What a poll has brought is known on a node at any time after the poll was sent. So a node may grant an offer
 *     as that of any of its polls, whenever the key is free or released.
 * This is more than nodes and networks can do, so what holds here holds for them, too. How a client chooses (when
 * it gives up, who is next, that it waits for its turn) is left to chance.
 *
 * Left out: spans of different lengths, seeds of counters by clocks that differ, two nodes without their memory at
 * a time, even numbers of nodes.
 */
#ifndef C
#define C 2
#endif
#ifndef STAMPS
#define STAMPS 2	/* of each client at a time: its polls, acquires of offers, and refreshes */
#endif
#define N 3

#define FREE 0
#define POLL(c) (1 + 3 * (c))	/* the owner of c's attempt, */
#define OFFER(c) (2 + 3 * (c))	/* of its offer, */
#define LEASE(c) (3 + 3 * (c))	/* and of its lease, which was one of these */
#define OF(c, o) ((o) > 3 * (c) && (o) <= 3 * (c) + 3)

#define AT(c, n) ((c) * N + (n))
#define BIT(i) (1 << (i))
#define MAJORITY(v) ((v) == 3 || (v) >= 5)	/* of the nodes' bits */
#define LARGER(a, b) ((a) > (b) -> (a) : (b))

/* nodes */
byte own[N];
byte stamp[N];	/* the last one of its client, when that got the key */
bool forgot;	/* node 0 is in quarantine, */
byte until[C];	/* until these stamps are over */

/* messages about grants, of the offer that there is: */
byte granted[C * N];	/* as which polls */

/* clients */
mtype = { waiting, raising, holding }
mtype st[C] = waiting;
byte stamps[C];
byte pollK[C];		/* its stamp; 0: none is under way */
byte pollVotes[C];
byte offerKs[C];	/* the polls that have brought it; 0: there is none */
byte offerVotes[C];
byte offerK[C];		/* the least stamp of the votes */
byte askK[C];		/* since when nodes are asked; 0: not yet */
byte leaseK[C];
byte refreshK[C];	/* 0: none is under way */
byte refreshVotes[C];

#ifdef TOKENS
#ifndef MOST
#define MOST 5
#endif
byte counter[N];
byte grantedT[C * N];			/* of the last message */
byte pollT[C], offerT[C], leaseT[C];	/* the largest so far; of a lease that is raised, what it is raised to */
bool differ[C * 2];
byte raised[C];
byte last;				/* the largest that anybody has held */
#define COUNT(n) counter[n]++
#define MORE(n) (counter[n] < MOST)
#define T(n) counter[n]
#define POLLT(c) pollT[c], differ[2 * (c)]
#define OFFERT(c) offerT[c], differ[2 * (c) + 1]
#define GRANTT(c, n) grantedT[AT(c, n)]
#define MESSAGE(c, n, k) granted[AT(c, n)] = BIT(k); grantedT[AT(c, n)] = counter[n]
#else
#define COUNT(n) skip
#define MORE(n) true
#define T(n) 0
#define POLLT(c) 0, false
#define OFFERT(c) 0, false
#define GRANTT(c, n) 0
#define MESSAGE(c, n, k) granted[AT(c, n)] = granted[AT(c, n)] | BIT(k)
#endif

/* A new grant of a node that has forgotten what it granted before is no vote. */
#ifdef NO_S17
#define VOTES(n) true
#else
#define VOTES(n) !((n) == 0 && forgot)
#endif

/* It confirms refreshes when no attempt is under way any more that it has granted before. */
#ifdef AT_ONCE
#define CONFIRMS(n) true
#else
#define GRANTED0(c) ((pollVotes[c] & 1) || (offerVotes[c] & 1) || granted[AT(c, 0)])
#define CONFIRMS(n) (VOTES(n) || !GRANTED0(0) && !GRANTED0(1) && !GRANTED0(C - 1))
#endif

#define OTHER(c, i) (((c) + (i)) % C)
#define BELIEVES(c) (st[c] == holding)

/* becomes has the nodes know owner o as p from now on. */
inline becomes(o, p) {
	if :: own[0] == o -> own[0] = p; stamp[0] = (p -> stamp[0] : 0) :: else fi;
	if :: own[1] == o -> own[1] = p; stamp[1] = (p -> stamp[1] : 0) :: else fi;
	if :: own[2] == o -> own[2] = p; stamp[2] = (p -> stamp[2] : 0) :: else fi
}

inline noPoll(c) {
	pollK[c] = 0; pollVotes[c] = 0;
#ifdef TOKENS
	pollT[c] = 0; differ[2 * (c)] = false;
#endif
	becomes(POLL(c), FREE)
}

inline noOffer(c) {
	offerKs[c] = 0; offerVotes[c] = 0; offerK[c] = 0; askK[c] = 0;
	granted[AT(c, 0)] = 0; granted[AT(c, 1)] = 0; granted[AT(c, 2)] = 0;
#ifdef TOKENS
	offerT[c] = 0; differ[2 * (c) + 1] = false;
	grantedT[AT(c, 0)] = 0; grantedT[AT(c, 1)] = 0; grantedT[AT(c, 2)] = 0;
#endif
	becomes(OFFER(c), FREE)
}

inline noLease(c) {
	leaseK[c] = 0; refreshK[c] = 0; refreshVotes[c] = 0; st[c] = waiting;
#ifdef TOKENS
	leaseT[c] = 0; raised[c] = 0;
#endif
	becomes(LEASE(c), FREE)
}

#define LESS(x) x = (x -> x - 1 : 0)

/* passes has the time pass for c: what is of its oldest stamp is over. */
inline passes(c) {
	stamps[c]--;
	LESS(until[c]);
	if :: OF(c, own[0]) -> LESS(stamp[0]) :: else fi;
	if :: OF(c, own[1]) -> LESS(stamp[1]) :: else fi;
	if :: OF(c, own[2]) -> LESS(stamp[2]) :: else fi;
	granted[AT(c, 0)] = (granted[AT(c, 0)] >> 1) & ~1;
	granted[AT(c, 1)] = (granted[AT(c, 1)] >> 1) & ~1;
	granted[AT(c, 2)] = (granted[AT(c, 2)] >> 1) & ~1;
	if :: pollK[c] == 1 -> noPoll(c) :: else -> LESS(pollK[c]) fi;
	if :: leaseK[c] == 1 -> noLease(c) :: else -> LESS(leaseK[c]); LESS(refreshK[c]) fi;
	offerKs[c] = (offerKs[c] >> 1) & ~1;
	LESS(askK[c]);
	if	/* no vote is over, or the offer is */
	:: offerK[c] == 1 || !offerKs[c] && !askK[c] -> noOffer(c)
	:: else -> LESS(offerK[c])
	fi
}

/* holds has c believe in its lease. */
inline holds(c) {
	st[c] = holding;
#ifdef TOKENS
	assert(leaseT[c] > last);	/* tokens rise */
	last = leaseT[c]; leaseT[c] = 0; raised[c] = 0;
#endif
	/* Nobody else may. (What makes a belief begin or last is this, and a refresh, which has had it already.) */
	assert(!BELIEVES(OTHER(c, 1)) && (C == 2 || !BELIEVES(OTHER(c, C - 1))))
}

/* wins follows when c's attempt or offer has a majority: it has the lease, from stamp k on. */
inline wins(c, o, k, t, d) {
	if
	:: k == 0 -> if :: o == POLL(c) -> noPoll(c) :: else -> noOffer(c) fi
	:: else ->
		leaseK[c] = k; st[c] = raising;
#ifdef TOKENS
		leaseT[c] = t;
#ifdef NO_S8
		if :: true -> becomes(o, LEASE(c)); holds(c)
#else
		if :: !d -> becomes(o, LEASE(c)); holds(c)
#endif
		:: else -> becomes(o, LEASE(c))
		fi;
#else
		becomes(o, LEASE(c)); holds(c);
#endif
		noPoll(c); noOffer(c)
	fi
}

inline pollCounts(c, n) {
#ifdef TOKENS
	differ[2 * (c)] = differ[2 * (c)] || pollVotes[c] && T(n) != pollT[c];
	pollT[c] = LARGER(T(n), pollT[c]);
#endif
	pollVotes[c] = pollVotes[c] | BIT(n);
	if :: MAJORITY(pollVotes[c]) -> wins(c, POLL(c), pollK[c], POLLT(c)) :: else fi
}

inline offerCounts(c, n, k, t) {
	if
#ifdef NO_S15
	:: offerVotes[c] & BIT(n) -> offerVotes[c] = 7	/* one more vote: as if of another node */
	:: else -> offerVotes[c] = offerVotes[c] | BIT(n)
	fi;
	if :: true ->
#else
	:: !(offerVotes[c] & BIT(n)) ->
		offerVotes[c] = offerVotes[c] | BIT(n);
		granted[AT(c, n)] = 0;	/* others of this node tell nothing */
#endif
#ifdef TOKENS
		differ[2 * (c) + 1] = differ[2 * (c) + 1] || offerT[c] && t != offerT[c];
		offerT[c] = LARGER(t, offerT[c]);
#endif
#ifdef NO_MINIMUM
		offerK[c] = LARGER(offerK[c], k);
#else
		offerK[c] = (offerK[c] && offerK[c] < k -> offerK[c] : k);
#endif
		if :: MAJORITY(offerVotes[c]) -> wins(c, OFFER(c), offerK[c], OFFERT(c)) :: else fi
	:: else
	fi
}

/* What may happen between a client and a node. */
proctype line(byte c; byte n) {
	byte k;
	do
	/* An acquire is executed; its answer comes, or not. */
	:: atomic { pollK[c] && (own[n] == FREE && MORE(n) || own[n] == POLL(c)) ->
		if :: own[n] == FREE -> COUNT(n) :: else fi;
		own[n] = POLL(c); stamp[n] = stamps[c];
		if :: VOTES(n) && !(pollVotes[c] & BIT(n)) -> pollCounts(c, n) :: true fi }
	:: atomic { askK[c] && (own[n] == FREE && MORE(n) || own[n] == OFFER(c)) ->
		if :: own[n] == FREE -> COUNT(n) :: else fi;
		own[n] = OFFER(c); stamp[n] = stamps[c];
		if :: VOTES(n) && !(offerVotes[c] & BIT(n)) -> offerCounts(c, n, askK[c], T(n)) :: true fi }

	/* A release grants the key, as any poll of the offer. */
	:: atomic { offerKs[c] && own[n] == FREE && VOTES(n) && MORE(n) ->
		k = 1;
		do
		:: offerKs[c] & BIT(k) -> break
		:: offerKs[c] >> (k + 1) -> k++
		od;
		COUNT(n);
		own[n] = OFFER(c); stamp[n] = stamps[c];
#ifndef NO_S15
		if :: offerVotes[c] & BIT(n) :: else -> MESSAGE(c, n, k) fi;
#else
		MESSAGE(c, n, k);
#endif
		k = 0 }

	/* The message of that comes. */
	:: atomic { granted[AT(c, n)] ->
		k = 1;
		do
		:: granted[AT(c, n)] & BIT(k) -> break
		:: granted[AT(c, n)] >> (k + 1) -> k++
		od;
#ifdef NO_S18
		/* It is valid from now on. */
		if :: stamps[c] < STAMPS -> stamps[c]++ :: true fi;
		k = stamps[c];
#endif
		if :: k -> offerCounts(c, n, k, GRANTT(c, n)) :: else fi;
		k = 0 }

#ifdef REFRESH
	/* A repair, or an acquire of the lease's owner that is late: no vote. */
	:: atomic { leaseK[c] && own[n] == FREE && MORE(n) -> COUNT(n); own[n] = LEASE(c); stamp[n] = stamps[c] }

	/* A refresh is executed; its answer comes, or not. A node that has forgotten what it granted before does not
	   confirm one at first: see CONFIRMS. */
	:: atomic { refreshK[c] && own[n] == LEASE(c) ->
		stamp[n] = stamps[c];
		if :: CONFIRMS(n) -> refreshVotes[c] = refreshVotes[c] | BIT(n) :: else fi;
		if
		:: MAJORITY(refreshVotes[c]) && leaseK[c] ->
			leaseK[c] = refreshK[c]; refreshK[c] = 0; refreshVotes[c] = 0
		:: else
		fi }
#endif
#ifdef TOKENS
	/* So is a raise. */
	:: atomic { st[c] == raising && own[n] == LEASE(c) && !(raised[c] & BIT(n)) ->
		counter[n] = LARGER(counter[n], leaseT[c]);
		stamp[n] = stamps[c];
		raised[c] = raised[c] | BIT(n);
		if :: MAJORITY(raised[c]) && leaseK[c] -> holds(c) :: else fi }
#endif
	od
}

proctype client(byte c) {
	do
	/* A poll, which brings the offer, a new one if there is none. */
	:: atomic { st[c] == waiting && !pollK[c] && stamps[c] < STAMPS ->
		stamps[c]++; pollK[c] = stamps[c];
#ifndef NO_OFFERS
		offerKs[c] = offerKs[c] | BIT(pollK[c]);
#endif
		}
	:: atomic { pollK[c] -> noPoll(c) }	/* it has failed, or had no answer in time */

	/* The nodes that have not voted are asked. */
	:: atomic { offerKs[c] && !askK[c] && stamps[c] < STAMPS -> stamps[c]++; askK[c] = stamps[c] }
	:: atomic { offerKs[c] || askK[c] ->
#ifdef NO_S19
		skip	/* it counts still: see node */
#else
		noOffer(c)
#endif
		}

	/* The lease is refreshed; and it ends. */
#ifdef REFRESH
	:: atomic { st[c] == holding && !refreshK[c] && stamps[c] < STAMPS -> stamps[c]++; refreshK[c] = stamps[c] }
#endif
	:: atomic { leaseK[c] -> noLease(c) }

	:: atomic { stamps[c] -> passes(c) }
	od
}

proctype node(byte n) {
	do
	:: atomic { own[n] && !stamp[n] -> own[n] = FREE }
#ifdef TOKENS
	:: own[n] == FREE && MORE(n) -> COUNT(n)	/* an acquire that is late; or of another key with this counter */
#endif
#ifdef NO_S19
	/* An offer that has been given up is undone, and goes on counting. */
	:: atomic { own[n] == OFFER(0) || own[n] == OFFER(1) -> own[n] = FREE; stamp[n] = 0 }
#endif
#ifdef LOSS
	/* Node 0 loses its memory. Its counter goes on at its clock, above all tokens. */
	:: atomic { n == 0 && !forgot ->
		forgot = true;
		own[n] = FREE; stamp[n] = 0;
		until[0] = stamps[0]; until[1] = stamps[1];
#if C > 2
		until[2] = stamps[2];
#endif
#ifdef TOKENS
		counter[n] = LARGER(counter[0], counter[1]); counter[n] = LARGER(counter[n], counter[2])
#endif
		}
	:: atomic { n == 0 && forgot && !until[0] && !until[1] && !until[C - 1] -> forgot = false }
#endif
	od
}

init {
	atomic {
		run line(0, 0); run line(0, 1); run line(0, 2); run client(0);
		run line(1, 0); run line(1, 1); run line(1, 2); run client(1);
#if C > 2
		run line(2, 0); run line(2, 1); run line(2, 2); run client(2);
#endif
		run node(0); run node(1); run node(2)
	}
}
