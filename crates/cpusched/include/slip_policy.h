/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The placement policy of Slipstream's CPU scheduler.
 *
 * Pure inline functions over plain structs. The same text is compiled into the BPF program (a real
 * kernel) and into the host simulator (any machine). Time and random numbers are arguments; all
 * state is in the structs below; every loop has a constant bound; no step costs O(CPUs).
 *
 * The includer defines u8, u32, s32, u64, s64 and bool, struct slip_env, and the five slip_env_*()
 * functions declared below, which are all that the policy asks of its surroundings.
 *
 * Words: an LLC is a group of at most SLIP_LLC_CPUS CPUs that share a last-level cache (the loader
 * splits larger ones). A hand-over is a wakee put on its waker's CPU, to run when the waker blocks.
 */
#ifndef SLIP_POLICY_H
#define SLIP_POLICY_H

#define SLIP_LLC_CPUS	64u	/* one bit a CPU in struct slip_llc's masks */
#define SLIP_LEVELS	3u	/* 0 interactive, 1 mixed, 2 hog */
#define SLIP_WEIGHT	100u	/* weight of a task of nice 0, as sched_ext counts */
#define SLIP_LOAD_SCALE	1024u	/* load of an LLC with one runnable task a CPU */
#define SLIP_STEAL_TRIES	4u	/* hand-overs of other CPUs looked at per dispatch */
#define SLIP_DOMAINS	64u	/* per LLC: 0 tasks of any CPU, the others one CPU mask each */
#define SLIP_LAG_MAX_NS	50000000ull	/* credit that a runnable task may gather, virtual ns */

#define slip_inline static inline __attribute__((always_inline, unused))

/* Where a wake-up was sent; also the index of its counter. */
enum slip_path {
	SLIP_HANDOFF = 0,	/* to the waker's CPU, when the waker blocks */
	SLIP_PREV_IDLE,		/* to the idle CPU it last ran on */
	SLIP_LLC_CORE,		/* to a wholly idle core of its LLC */
	SLIP_LLC_THREAD,	/* to an idle hardware thread of its LLC */
	SLIP_FAR_IDLE,		/* to an idle CPU of another LLC, by pick-two */
	SLIP_MASK_IDLE,		/* a task with its own CPU mask: to an idle CPU of the mask */
	SLIP_PREEMPT,		/* into the LLC's queue, and its previous CPU's hog is preempted */
	SLIP_QUEUE_LLC,		/* into the LLC's queue, by virtual time */
	SLIP_QUEUE_CPU,		/* a task of one CPU: into that CPU's queue */
	SLIP_PATHS,
};

/* Counters. The first SLIP_PATHS are indexed by enum slip_path. */
enum slip_counter {
	SLIP_C_RAN_NEXT = SLIP_PATHS,	/* hand-overs that ran when the waker left its CPU */
	SLIP_C_STOLEN,		/* hand-overs that another CPU took */
	SLIP_C_HINT_LIED,	/* hand-overs whose waker kept its CPU longer than an idle CPU takes */
	SLIP_C_HINT_REFUSED,	/* hand-overs not made because of what was learned */
	SLIP_C_TICK_KICK,	/* idle CPUs kicked at the tick for a hand-over that still waited */
	SLIP_C_FAR_PULL,	/* tasks that an idle CPU took from another LLC */
	SLIP_C_KEPT,		/* slices renewed because nobody else wanted the CPU */
	SLIP_C_TRUSTED,		/* hand-overs by wakers that kept their word: nobody may take them */
	SLIP_C_MADE_ROOM,	/* wakers sent off their CPU at the tick for such a hand-over */
	SLIP_C_REENQUEUED,	/* tasks taken back from a CPU that a real-time task took */
	SLIP_C_RESCUED,		/* idle CPUs that the timer woke for a task that waited */
	SLIP_C_AGED,		/* tasks that waited so long that the timer sent them to a CPU */
	SLIP_COUNTERS,
};

/* Tunables. slip_params_default() fills them in; a class may override slice and weight. */
struct slip_params {
	u64 slice_ns[SLIP_LEVELS];	/* slice of a weight-100 task, by level */
	u64 slice_min_ns;	/* no slice is shorter: below it switching costs too much */
	u64 slice_max_ns;	/* nor longer: it bounds how long an interactive task waits */
	u64 wake_idle_ns;	/* cost of waking an idle CPU; hand off only if the waker blocks sooner */
	u64 patience_ns;	/* a task that waited this long may leave its LLC at once */
	u32 residency_runs;	/* runs on an LLC before a task may leave it */
	u32 slack_pct;		/* how much busier than another the own LLC must be to leave it */
	u32 saturated_pct;	/* an LLC is saturated when at most this share of its CPUs idles ... */
	u32 relaxed_pct;	/* ... and no longer when at least this share does */
	u32 hand_off;		/* 0: never hand over */
	u32 learn;		/* 0: believe every hint */
	u32 preempt;		/* 0: a wake-up never preempts a hog */
	u32 saturated_runs;	/* instead of residency_runs, to a wakee whose LLC is saturated */
	u32 trust_after;	/* honest hints in a row that earn trust, see slip_trusted() */
	u32 pad;
};

/* A task. Zeroed at birth, then slip_task_init(). */
struct slip_task {
	u64 vtime;		/* weighted run time, ns at weight 100, on its domain's clock */
	u64 exec_ns;		/* CPU time that slip_account() has seen */
	u64 queued_at;		/* when it last became runnable */
	u64 burst_ns;		/* CPU time since it last blocked */
	u64 sync_ns;		/* its CPU time at its first sync wake-up since then; 0 none */
	u64 block_ns;		/* learned: CPU time from its sync wake-ups to its leaving the CPU */
	u64 llc_mask;		/* LLCs that its class may use; 0 all */
	u64 slice_cap_ns;	/* its class's longest slice; 0 none */
	u32 weight;
	u32 llc;
	u32 runs_on_llc;	/* times it got a CPU of that LLC in a row */
	u32 level;
	u32 handed;		/* its sync wake-up was handed over: SLIP_HANDED_* */
	u32 honest;		/* hints in a row that it kept */
	u32 no_hand_off;	/* its class wants an idle CPU rather than a hand-over */
	u32 domain;		/* below SLIP_DOMAINS: of its LLC; else SLIP_DOMAINS + its only CPU */
	u32 queued;		/* it got its CPU in competition: from a queue, or against one */
	u32 pad;
};

#define SLIP_HANDED_OPEN	1u	/* where an idle CPU may take it */
#define SLIP_HANDED_TRUSTED	2u	/* into the CPU's own queue, see slip_trusted() */

/* A CPU. */
struct slip_cpu {
	u64 handover_at;	/* when its last hand-over was put there */
	u32 llc;
	u32 bit;		/* its place in its LLC's masks */
	u32 level;		/* level of the task that ran here at the last tick */
	u32 pad;
};

/*
 * Tasks that compete for the same CPUs: those of any CPU, those of one mask, those of one CPU. Each
 * domain has a clock of its own, because virtual time passes at another rate where more compete.
 * `offset` leads from there to the LLC's clock, on which tasks of several domains are compared.
 *
 * A domain whose clock falls behind the LLC's by more than a slice is moved up as a whole. So the
 * shares inside of a domain are those of the weights, whatever the others do, and no domain gathers
 * more than a slice of credit against the others.
 */
struct slip_domain {
	u64 clock;		/* virtual time of the latest task that got a CPU in competition */
	u64 offset;
};

/* The CPUs that share a cache. */
struct slip_llc {
	u64 vclock;		/* virtual time of the domain that is furthest */
	u64 idle_mask;		/* bit per CPU */
	u64 handover_mask;	/* bit per CPU on which a hand-over waits */
	u32 nr_cpus;
	u32 nr_queued;		/* tasks in the LLC's queue */
	u32 saturated;		/* with hysteresis, see slip_llc_update() */
	u32 overloaded;
};

/* What is known of a wake-up. */
struct slip_wake {
	u64 now;
	u64 rnd;
	u32 waker_cpu;
	u32 prev_cpu;
	u32 waker_llc;
	u32 prev_llc;
	u32 waker_queued;	/* tasks that wait on the waker's CPU alone */
	u32 nr_llcs;
	u32 flags;
	u32 pad;
};

#define SLIP_WAKE_SYNC		1u	/* the waker says that it is about to block */
#define SLIP_WAKE_EXITING	2u	/* the waker is exiting */
#define SLIP_WAKE_WAKER_OK	4u	/* the wakee may run on the waker's CPU */
#define SLIP_WAKE_PREV_OK	8u	/* the wakee may run on its previous CPU */
#define SLIP_WAKE_MASKED	16u	/* the wakee may not run on every CPU */
#define SLIP_WAKE_SINGLE	32u	/* the wakee may run on one CPU only */

/* The decision. `cpu` is valid for all paths but those into the LLC's queue. */
struct slip_placement {
	u32 path;
	u32 cpu;
	u32 llc;
	u32 refused;		/* a hand-over was not made because of what was learned */
};

/* What the surroundings provide. "Claim" tests and clears the idle state, so that one wins. */
struct slip_env;
static bool slip_env_claim_cpu(struct slip_env *env, u32 cpu);
static s32 slip_env_claim_core(struct slip_env *env, u32 llc);
static s32 slip_env_claim_thread(struct slip_env *env, u32 llc);
static s32 slip_env_claim_masked(struct slip_env *env);
static struct slip_llc *slip_env_llc(struct slip_env *env, u32 llc);

slip_inline u64 slip_max(u64 a, u64 b) { return a > b ? a : b; }
slip_inline u64 slip_min(u64 a, u64 b) { return a < b ? a : b; }

/* Virtual times wrap; the order is that of their difference. */
slip_inline bool slip_before(u64 a, u64 b) { return (s64)(a - b) < 0; }

/* Bits set, without a loop or a library call. Warren, Hacker's Delight, section 5-1. */
slip_inline u32 slip_count_bits(u64 x)
{
	x = x - ((x >> 1) & 0x5555555555555555ull);
	x = (x & 0x3333333333333333ull) + ((x >> 2) & 0x3333333333333333ull);
	x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0full;
	return (u32)((x * 0x0101010101010101ull) >> 56);
}

/* Index of the lowest bit set; 64 for 0. */
slip_inline u32 slip_lowest_bit(u64 x)
{
	return x ? slip_count_bits((x & (~x + 1)) - 1) : 64;
}

slip_inline u64 slip_bit(u32 bit) { return 1ull << (bit & 63); }

/* SplitMix64's output function: one random word gives several independent ones. */
slip_inline u64 slip_mix(u64 x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
	return x ^ (x >> 31);
}

slip_inline void slip_params_default(struct slip_params *p)
{
	p->slice_ns[0] = 1000000;
	p->slice_ns[1] = 3000000;
	p->slice_ns[2] = 6000000;
	p->slice_min_ns = 500000;
	p->slice_max_ns = 12000000;
	p->wake_idle_ns = 20000;
	p->patience_ns = 12000000;
	p->residency_runs = 4;
	p->slack_pct = 10;
	p->saturated_pct = 5;
	p->relaxed_pct = 15;
	p->hand_off = 1;
	p->learn = 1;
	p->preempt = 1;
	p->saturated_runs = 1;
	p->trust_after = 4;
	p->pad = 0;
}

/* ---- saturation -------------------------------------------------------------------------- */

/*
 * Bring an LLC's flags up to date; called when a CPU's idle state or the queue's length changed.
 *
 * Saturated: (almost) no CPU idles. Overloaded: also a task a CPU waits. Each flag has two
 * thresholds, or it would flip with every wake-up of an LLC of eight CPUs. The flags are written
 * without a lock: a late writer is put right by the next change.
 */
slip_inline void slip_llc_update(const struct slip_params *p, struct slip_llc *llc)
{
	u32 idle = slip_count_bits(llc->idle_mask) * 100;

	if (idle <= p->saturated_pct * llc->nr_cpus) {
		if (!llc->saturated)
			llc->saturated = 1;
	} else if (idle >= p->relaxed_pct * llc->nr_cpus) {
		if (llc->saturated)
			llc->saturated = 0;
	}
	if (llc->nr_queued >= llc->nr_cpus) {
		if (!llc->overloaded)
			llc->overloaded = 1;
	} else if (llc->nr_queued == 0) {
		if (llc->overloaded)
			llc->overloaded = 0;
	}
}

/* A CPU became idle or busy. Idempotent, so a missed edge does no lasting harm. */
slip_inline void slip_cpu_set_idle(const struct slip_params *p, struct slip_llc *llc,
				   const struct slip_cpu *cpu, bool idle)
{
	if (idle)
		__sync_fetch_and_or(&llc->idle_mask, slip_bit(cpu->bit));
	else
		__sync_fetch_and_and(&llc->idle_mask, ~slip_bit(cpu->bit));
	slip_llc_update(p, llc);
}

/* Runnable tasks per CPU, scaled. */
slip_inline u32 slip_llc_load(const struct slip_llc *llc)
{
	u32 busy;

	if (!llc->nr_cpus)
		return ~0u;
	busy = llc->nr_cpus - (u32)slip_min(slip_count_bits(llc->idle_mask), llc->nr_cpus);
	return (busy + llc->nr_queued) * SLIP_LOAD_SCALE / llc->nr_cpus;
}

/* ---- tasks ------------------------------------------------------------------------------- */

/* `clock`: that of the task's domain. */
slip_inline void slip_task_init(struct slip_task *t, u32 weight, u32 llc, u64 clock)
{
	t->vtime = clock;
	t->weight = weight ? weight : SLIP_WEIGHT;
	t->llc = llc;
	t->level = 0;
}

/* No index: the kernel's verifier would want each of them proven. */
slip_inline u64 slip_level_slice(const struct slip_params *p, u32 level)
{
	if (level == 0)
		return p->slice_ns[0];
	return level == 1 ? p->slice_ns[1] : p->slice_ns[SLIP_LEVELS - 1];
}

/* Slice of a task: by level and weight, shorter where many wait, within bounds. */
slip_inline u64 slip_slice(const struct slip_params *p, const struct slip_task *t,
			   const struct slip_llc *llc)
{
	u64 slice = slip_level_slice(p, t->level);

	if (t->weight != SLIP_WEIGHT)
		slice = slice * t->weight / SLIP_WEIGHT;

	if (llc->nr_queued > llc->nr_cpus)
		slice = slice * llc->nr_cpus / llc->nr_queued;
	if (t->slice_cap_ns)
		slice = slip_min(slice, t->slice_cap_ns);
	return slip_min(slip_max(slice, p->slice_min_ns), p->slice_max_ns);
}

/*
 * Brings a domain and its LLC level: the LLC's clock is that of the furthest domain, and none is
 * more than the longest slice behind. Stores, no additions: two CPUs that do it at once agree.
 */
slip_inline void slip_domain_sync(const struct slip_params *p, struct slip_llc *llc,
				  struct slip_domain *d)
{
	u64 at = d->clock + d->offset;

	if (slip_before(llc->vclock, at))
		llc->vclock = at;
	else if (slip_before(at, llc->vclock - p->slice_max_ns))
		d->offset = llc->vclock - p->slice_max_ns - d->clock;
}

/*
 * A task leaves one domain for another, because its mask changed or another LLC took it. What it is
 * owed, or owes, comes along: within the bounds for a runnable task, and a second the other way.
 */
slip_inline void slip_change_domain(struct slip_task *t, const struct slip_domain *from,
				    const struct slip_domain *to)
{
	s64 lag = (s64)(t->vtime - from->clock);

	if (lag < -(s64)SLIP_LAG_MAX_NS)
		lag = -(s64)SLIP_LAG_MAX_NS;
	if (lag > 1000000000)
		lag = 1000000000;
	t->vtime = to->clock + (u64)lag;
}

/*
 * A task is about to be queued: its virtual time catches up with its domain's, so that credit is
 * bounded. The bound is far enough that it does not touch tasks that compete with each other, whose
 * order is what makes their shares; it is for one that cannot use what it is due, on one CPU.
 */
slip_inline void slip_on_runnable(const struct slip_params *p, struct slip_task *t,
				  struct slip_llc *llc, struct slip_domain *d, u64 now)
{
	u64 floor = d->clock - SLIP_LAG_MAX_NS;

	t->queued_at = now;
	t->queued = 1;
	if (slip_before(t->vtime, floor))
		t->vtime = floor;
	slip_domain_sync(p, llc, d);
}

/*
 * A task ran where no other wanted the CPU just then: it earns no credit by that, and what it owes is
 * bounded: by four of its slices, or one if that is more than half a second. Less would be wrong
 * where a CPU is contended by turns, because of masks; more would let a light task, which was alone
 * on its CPU, wait for long.
 */
slip_inline void slip_on_kept(const struct slip_params *p, struct slip_task *t,
			      const struct slip_domain *d)
{
	u64 slice = p->slice_max_ns * SLIP_WEIGHT / (t->weight ? t->weight : 1);
	u64 most = d->clock + slip_min(4 * slice, slip_max(slice, 500000000));

	t->queued = 0;
	if (slip_before(t->vtime, d->clock - p->slice_max_ns))
		t->vtime = d->clock - p->slice_max_ns;
	else if (slip_before(most, t->vtime))
		t->vtime = most;
}

/* The running task goes on for another slice, because it comes before those that wait. */
slip_inline void slip_on_turn(struct slip_task *t) { t->queued = 1; }

/*
 * Key in a queue: the task's virtual deadline on the LLC's clock, i.e. where its virtual time will
 * stand after one slice. Among equals the one that asks for less goes first (as in EEVDF); the share
 * of the CPU depends on virtual time alone.
 */
slip_inline u64 slip_queue_key(const struct slip_task *t, const struct slip_domain *d, u64 slice)
{
	return t->vtime + d->offset + slice * SLIP_WEIGHT / (t->weight ? t->weight : 1);
}

/*
 * The running task, which has used `exec_ns` of CPU time in all, is making a wake-up with the sync
 * hint. The first one since it last blocked counts: a wakee handed over waits for all that follows.
 */
slip_inline void slip_on_sync_wake(struct slip_task *waker, u64 exec_ns)
{
	if (!waker->sync_ns)
		waker->sync_ns = exec_ns ? exec_ns : 1;
}

/*
 * What became of a sync wake-up, once the waker has left its CPU. Returns true if a hand-over was
 * a lie: the waker went on for longer than waking an idle CPU takes.
 *
 * One long lie (8 times the threshold, a quarter of it kept) is enough to refuse the next hint: a
 * wakee that waits behind its waker loses far more than one that wakes an idle CPU. The cap bounds
 * how many honest hints it takes to be believed again.
 */
slip_inline bool slip_learn(const struct slip_params *p, struct slip_task *t, u64 exec_ns)
{
	u64 took = exec_ns > t->sync_ns ? exec_ns - t->sync_ns : 0;
	bool kept = took <= p->wake_idle_ns, lied = t->handed && !kept;

	t->block_ns = (t->block_ns * 3 + slip_min(took, 8 * p->wake_idle_ns)) / 4;
	t->honest = kept ? t->honest + (t->honest < p->trust_after) : 0;
	t->sync_ns = 0;
	t->handed = 0;
	return lied;
}

/* Charges a task for the CPU time that it has used up to `exec_ns`. Returns what was new. */
slip_inline u64 slip_charge(struct slip_task *t, u64 exec_ns)
{
	u64 used = exec_ns - t->exec_ns;

	t->exec_ns = exec_ns;
	t->vtime += t->weight == SLIP_WEIGHT ? used :
					       used * SLIP_WEIGHT / (t->weight ? t->weight : 1);
	t->burst_ns += used;
	return used;
}

/*
 * Takes into account what a task did since the last call: when it wakes up (`blocked`), and when
 * its slice has ended or it was preempted. It has used `exec_ns` of CPU time in all, of late on
 * LLC `id`, where `d` is its domain; `from` is its domain on the LLC it was on before.
 *
 * Nothing at all is called when a task gets or leaves a CPU. Those are the hottest moments of a
 * hand-over, and the surroundings count its CPU time anyway. Returns as slip_learn().
 */
slip_inline bool slip_account(const struct slip_params *p, struct slip_task *t, u32 id,
			      struct slip_llc *llc, const struct slip_domain *from,
			      struct slip_domain *d, u64 exec_ns, bool blocked)
{
	bool lied = 0;

	if (t->llc != id) {
		slip_change_domain(t, from, d);
		t->llc = id;
		t->runs_on_llc = 0;
	}
	if (t->runs_on_llc < ~0u)
		t->runs_on_llc++;
	if (t->queued && slip_before(d->clock, t->vtime))
		d->clock = t->vtime;
	slip_domain_sync(p, llc, d);
	slip_charge(t, exec_ns);
	if (!t->queued)
		slip_on_kept(p, t, d);
	if (t->sync_ns)
		lied = slip_learn(p, t, exec_ns);
	if (!blocked) {
		if (t->burst_ns >= slip_level_slice(p, t->level) && t->level < SLIP_LEVELS - 1)
			t->level++;
		return lied;
	}
	/* A long sleep earns no monopoly: one slice of credit. */
	t->queued = 0;
	if (slip_before(t->vtime, d->clock - p->slice_max_ns))
		t->vtime = d->clock - p->slice_max_ns;
	if (t->level > 0 && t->burst_ns < slip_level_slice(p, t->level - 1) / 2)
		t->level--;
	t->burst_ns = 0;
	return lied;
}

/*
 * May the task leave its LLC? It has run there often enough to have had its cache's worth, or has
 * waited long enough. A wakee that finds its LLC saturated needs fewer runs: it would wait for
 * somebody's slice to end, which costs more than filling a cache again.
 */
slip_inline bool slip_may_leave(const struct slip_params *p, const struct slip_task *t,
				bool saturated, u64 now)
{
	u32 runs = saturated ? p->saturated_runs : p->residency_runs;

	return t->runs_on_llc >= runs ||
	       (t->queued_at && now > t->queued_at && now - t->queued_at >= p->patience_ns);
}

slip_inline bool slip_llc_ok(const struct slip_task *t, u32 llc)
{
	return !t->llc_mask || (t->llc_mask & slip_bit(llc));
}

/* ---- placement --------------------------------------------------------------------------- */

/*
 * May the wakee have its waker's CPU? Only with the hint, and only where nobody else is waiting:
 * then the CPU goes from hand to hand without an interrupt or an idle exit. What was learned of the
 * waker counts last, so that `refused` means that it decided.
 *
 * A wakee from another LLC, `home`, comes only if the waker's is no busier. A waker often wakes many:
 * without this they all gathered around it and then waited for each other.
 */
slip_inline bool slip_may_hand_off(const struct slip_params *p, const struct slip_task *wakee,
				   const struct slip_task *waker, const struct slip_llc *llc,
				   const struct slip_llc *home, const struct slip_wake *w,
				   u32 *refused)
{
	u32 need = SLIP_WAKE_SYNC | SLIP_WAKE_WAKER_OK;

	if (!p->hand_off || (w->flags & (need | SLIP_WAKE_EXITING)) != need)
		return 0;
	if (wakee->no_hand_off || !slip_llc_ok(wakee, w->waker_llc))
		return 0;
	if (llc->saturated || llc->overloaded || llc->nr_queued || w->waker_queued)
		return 0;
	if (llc != home && (!slip_may_leave(p, wakee, 0, w->now) ||
			    slip_llc_load(llc) > slip_llc_load(home)))
		return 0;
	if (p->learn && waker->block_ns > p->wake_idle_ns) {
		*refused = 1;
		return 0;
	}
	return 1;
}

/*
 * The less loaded of two random LLCs other than `home`, or -1. Two choices suffice to keep the
 * fullest queue short: Mitzenmacher, "The power of two choices in randomized load balancing" (2001).
 */
slip_inline s32 slip_pick_two(struct slip_env *env, const struct slip_task *t, u32 home,
			      u32 nr_llcs, u64 rnd, bool busiest)
{
	struct slip_llc *a, *b;
	u32 i, j;
	bool a_ok, b_ok;

	if (nr_llcs < 2)
		return -1;
	/* Draw from the others: an offset of 1 .. nr_llcs - 1. */
	i = (home + 1 + (u32)(rnd & 0xffffffff) % (nr_llcs - 1)) % nr_llcs;
	j = (home + 1 + (u32)(rnd >> 32) % (nr_llcs - 1)) % nr_llcs;
	a_ok = !t || slip_llc_ok(t, i);
	b_ok = !t || slip_llc_ok(t, j);
	a = slip_env_llc(env, i);
	b = slip_env_llc(env, j);
	if (!a || !a_ok)
		return b && b_ok ? (s32)j : -1;
	if (!b || !b_ok)
		return (s32)i;
	if (busiest)
		return (s32)(slip_llc_load(b) > slip_llc_load(a) ? j : i);
	return (s32)(slip_llc_load(b) < slip_llc_load(a) ? j : i);
}

/* Is `home` busier than `other` by more than the slack? */
slip_inline bool slip_worth_moving(const struct slip_params *p, const struct slip_llc *home,
				   const struct slip_llc *other)
{
	return (u64)slip_llc_load(home) * 100 > (u64)slip_llc_load(other) * (100 + p->slack_pct);
}

/*
 * Where a task that wakes up goes. Claims the idle CPU that it names.
 *
 *   1  its waker's CPU         slip_may_hand_off()
 *   2  the CPU it last ran on, if idle
 *   3  an idle core, then an idle thread, of its LLC
 *   4  an idle CPU of the less loaded of two other LLCs, if it may leave and it is worth it
 *   5  its LLC's queue; a hog on its previous CPU makes room for an interactive task
 *
 * `prev_task_level` is read from the previous CPU's state by the caller (SLIP_LEVELS: unknown).
 */
slip_inline void slip_place(const struct slip_params *p, struct slip_env *env,
			    const struct slip_task *wakee, const struct slip_task *waker,
			    const struct slip_wake *w, u32 prev_task_level,
			    struct slip_placement *out)
{
	struct slip_llc *home, *waker_llc, *other;
	u32 home_id = w->prev_llc;
	s32 cpu, far;

	out->path = SLIP_QUEUE_LLC;
	out->cpu = w->prev_cpu;
	out->llc = home_id;
	out->refused = 0;

	waker_llc = slip_env_llc(env, w->waker_llc);
	home = w->waker_llc == w->prev_llc ? waker_llc : slip_env_llc(env, w->prev_llc);
	if (waker && waker_llc && home &&
	    slip_may_hand_off(p, wakee, waker, waker_llc, home, w, &out->refused)) {
		out->path = SLIP_HANDOFF;
		out->cpu = w->waker_cpu;
		out->llc = w->waker_llc;
		return;
	}

	/* A class that may not use the LLC it comes from is sent to the first that it may. */
	if (!slip_llc_ok(wakee, home_id)) {
		u32 first = slip_lowest_bit(wakee->llc_mask);

		if (first < w->nr_llcs)
			home_id = first;
		out->llc = home_id;
	} else if ((w->flags & SLIP_WAKE_PREV_OK) && slip_env_claim_cpu(env, w->prev_cpu)) {
		out->path = SLIP_PREV_IDLE;
		return;
	}

	if (w->flags & SLIP_WAKE_SINGLE) {
		out->path = SLIP_QUEUE_CPU;
		return;
	}
	if (w->flags & SLIP_WAKE_MASKED) {
		/* It waits in the queue of the LLC that it comes from; any CPU of its mask takes it. */
		out->llc = w->prev_llc;
		cpu = slip_env_claim_masked(env);
		if (cpu >= 0) {
			out->path = SLIP_MASK_IDLE;
			out->cpu = (u32)cpu;
		} else if (p->preempt && (w->flags & SLIP_WAKE_PREV_OK) && wakee->level == 0 &&
			   prev_task_level == SLIP_LEVELS - 1) {
			out->path = SLIP_PREEMPT;
		}
		return;
	}

	home = slip_env_llc(env, home_id);
	if (!home)
		return;
	if (home->idle_mask) {
		cpu = slip_env_claim_core(env, home_id);
		if (cpu >= 0) {
			out->path = SLIP_LLC_CORE;
			out->cpu = (u32)cpu;
			return;
		}
		cpu = slip_env_claim_thread(env, home_id);
		if (cpu >= 0) {
			out->path = SLIP_LLC_THREAD;
			out->cpu = (u32)cpu;
			return;
		}
	}

	if (slip_may_leave(p, wakee, home->saturated, w->now)) {
		far = slip_pick_two(env, wakee, home_id, w->nr_llcs, w->rnd, 0);
		other = far >= 0 ? slip_env_llc(env, (u32)far) : 0;
		if (other && other->idle_mask && slip_worth_moving(p, home, other)) {
			cpu = slip_env_claim_core(env, (u32)far);
			if (cpu < 0)
				cpu = slip_env_claim_thread(env, (u32)far);
			if (cpu >= 0) {
				out->path = SLIP_FAR_IDLE;
				out->cpu = (u32)cpu;
				out->llc = (u32)far;
				return;
			}
		}
	}

	if (p->preempt && wakee->level == 0 && home_id == w->prev_llc &&
	    prev_task_level == SLIP_LEVELS - 1)
		out->path = SLIP_PREEMPT;
}

/*
 * A waker that kept its word `trust_after` times in a row is trusted: what it hands over goes into
 * the CPU's own queue. That is the shortest way there is, and nobody else may take from there.
 * Should the waker go on this once, the tick sends it off (slip_tick_wants_room()), and trust
 * begins anew. All others' hand-overs lie where an idle CPU may take them.
 */
slip_inline bool slip_trusted(const struct slip_params *p, const struct slip_task *waker)
{
	return p->learn && waker->honest >= p->trust_after;
}

/* A hand-over was put on `cpu`. Returns whether into the CPU's own queue. */
slip_inline bool slip_handover_put(const struct slip_params *p, struct slip_llc *llc,
				   struct slip_cpu *cpu, struct slip_task *waker, u64 now)
{
	cpu->handover_at = now;
	if (slip_trusted(p, waker)) {
		waker->handed = SLIP_HANDED_TRUSTED;
		return 1;
	}
	waker->handed = SLIP_HANDED_OPEN;
	__sync_fetch_and_or(&llc->handover_mask, slip_bit(cpu->bit));
	return 0;
}

/* The hand-over on `cpu` was taken, by whomever. */
slip_inline void slip_handover_taken(struct slip_llc *llc, const struct slip_cpu *cpu)
{
	__sync_fetch_and_and(&llc->handover_mask, ~slip_bit(cpu->bit));
}

/* At the tick: has this CPU's hand-over waited so long that an idle CPU had better take it? */
slip_inline bool slip_tick_wants_kick(const struct slip_params *p, const struct slip_llc *llc,
				      const struct slip_cpu *cpu, u64 now)
{
	return (llc->handover_mask & slip_bit(cpu->bit)) && now > cpu->handover_at &&
	       now - cpu->handover_at >= p->wake_idle_ns;
}

/*
 * At the tick of the task that runs on `cpu`: should it make room for the task that it handed over,
 * trusted, so long ago? It is queued again, where any CPU may take it.
 */
slip_inline bool slip_tick_wants_room(const struct slip_params *p, const struct slip_task *running,
				      const struct slip_cpu *cpu, u64 now)
{
	return running->handed == SLIP_HANDED_TRUSTED && now > cpu->handover_at &&
	       now - cpu->handover_at >= p->wake_idle_ns;
}

/*
 * At the tick, tasks wait in LLC `home`: the other LLC whose idle CPU should come and pull, or -1.
 * Without it a queue could stand beside an idle LLC until somebody there next went to sleep.
 */
slip_inline s32 slip_tick_far(const struct slip_params *p, struct slip_env *env, u32 home,
			      u32 nr_llcs, u64 rnd)
{
	struct slip_llc *llc = slip_env_llc(env, home), *other;
	s32 far;

	if (!llc || !llc->nr_queued || llc->idle_mask)
		return -1;
	far = slip_pick_two(env, 0, home, nr_llcs, rnd, 0);
	other = far >= 0 ? slip_env_llc(env, (u32)far) : 0;
	return other && other->idle_mask && slip_worth_moving(p, llc, other) ? far : -1;
}

/* ---- dispatch ---------------------------------------------------------------------------- */

/* Where a CPU that needs work may find it. */
enum slip_source {
	SLIP_FROM_HANDOVER = 0,	/* the task handed to this CPU */
	SLIP_FROM_CPU,		/* tasks of this CPU alone */
	SLIP_FROM_LLC,		/* the LLC's queue: the first task that may run here */
	SLIP_FROM_NONE,		/* nothing here: other CPUs' hand-overs, then other LLCs */
	SLIP_FROM_PREV,		/* the task that runs goes on: its slice ended, its turn did not */
};

struct slip_heads {
	u64 cpu_key;		/* key of the first task in the CPU's own queue */
	u64 llc_key;		/* key of the first task in the LLC's queue */
	u64 prev_key;		/* key that the running task would have if it were queued now */
	u32 has_handover;
	u32 has_cpu;
	u32 has_llc;
	u32 has_prev;		/* the running task could go on; it is in no queue yet */
};

/*
 * The queue to take from next. The hand-over goes first: nobody was waiting when it was made, so
 * at most one task runs ahead of those that came since. Otherwise by virtual time. The running task
 * competes with those that wait: if it always gave way, a heavy task would get every other slice.
 */
slip_inline u32 slip_choose(const struct slip_heads *h)
{
	if (h->has_handover)
		return SLIP_FROM_HANDOVER;
	if (h->has_prev && (h->has_cpu || h->has_llc) &&
	    (!h->has_cpu || slip_before(h->prev_key, h->cpu_key)) &&
	    (!h->has_llc || slip_before(h->prev_key, h->llc_key)))
		return SLIP_FROM_PREV;
	if (h->has_cpu && (!h->has_llc || !slip_before(h->llc_key, h->cpu_key)))
		return SLIP_FROM_CPU;
	if (h->has_llc)
		return SLIP_FROM_LLC;
	return SLIP_FROM_NONE;
}

/*
 * The bit of the next other CPU of the LLC, after `bit`, with a hand-over waiting; 64 if none.
 * Starting after the own bit spreads the thieves. The caller clears bits from `mask` as it tries,
 * at most SLIP_STEAL_TRIES times.
 */
slip_inline u32 slip_next_handover(u64 mask, u32 bit)
{
	u64 others = mask & ~slip_bit(bit);
	u64 after = others & ~(slip_bit(bit) | (slip_bit(bit) - 1));

	return slip_lowest_bit(after ? after : others);
}

/*
 * May another CPU take the hand-over that waits on `victim`? Not while its waker can still be
 * expected to block: the hand-over would lose what it was made for.
 */
slip_inline bool slip_may_steal(const struct slip_params *p, const struct slip_cpu *victim, u64 now)
{
	return now > victim->handover_at && now - victim->handover_at >= p->wake_idle_ns;
}

/*
 * The LLC that an idle CPU of `home` should pull from, or -1: the more loaded of two others, if
 * tasks wait there.
 */
slip_inline s32 slip_pull_from(struct slip_env *env, u32 home, u32 nr_llcs, u64 rnd)
{
	s32 far = slip_pick_two(env, 0, home, nr_llcs, rnd, 1);
	struct slip_llc *llc = far >= 0 ? slip_env_llc(env, (u32)far) : 0;

	return llc && llc->nr_queued ? far : -1;
}

#endif /* SLIP_POLICY_H */
