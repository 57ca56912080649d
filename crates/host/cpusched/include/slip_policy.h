/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The placement policy of Slipstream's CPU scheduler.
 *
 * Pure inline functions over plain structs. The same text is compiled into the BPF program (a real
 * kernel) and into the host simulator (any machine). Time and random numbers are arguments; all
 * state is in the structs below; every loop has a constant bound; no step costs O(CPUs).
 *
 * The includer defines u8, u32, s32, u64, s64 and bool, struct slip_env, and the five slip_env_*()
 * functions declared below. The policy depends on nothing else.
 *
 * Terms: an LLC is a group of at most SLIP_LLC_CPUS CPUs that share a last-level cache (the loader
 * splits larger ones). A handoff puts a wakee on its waker's CPU, to run when the waker blocks.
 */
#ifndef SLIP_POLICY_H
#define SLIP_POLICY_H

#define SLIP_LLC_CPUS	64u	/* one bit per CPU in struct slip_llc's masks */
#define SLIP_LEVELS	3u	/* 0 interactive, 1 mixed, 2 hog */
#define SLIP_WEIGHT	100u	/* weight of a task of nice 0, in sched_ext's units */
#define SLIP_LOAD_SCALE	1024u	/* load of an LLC with one runnable task per CPU */
#define SLIP_STEAL_TRIES	4u	/* handoffs of other CPUs tried per dispatch */
#define SLIP_DOMAINS	64u	/* per LLC: 0 tasks without a mask, the others one CPU mask each */
#define SLIP_NODE_SLACK_PCT	25u	/* choose an LLC of another node only if it is better by this much */
#define SLIP_LAG_MAX_NS	50000000ull	/* maximum credit of a runnable task, virtual ns */

#define slip_inline static inline __attribute__((always_inline, unused))

/* The destination of a wake-up; also the index of its counter. */
enum slip_path {
	SLIP_HANDOFF = 0,	/* the waker's CPU, when the waker blocks */
	SLIP_PREV_IDLE,		/* the idle CPU that it last ran on */
	SLIP_LLC_CORE,		/* a wholly idle core of its LLC */
	SLIP_LLC_THREAD,	/* an idle hardware thread of its LLC */
	SLIP_FAR_IDLE,		/* an idle CPU of another LLC, by pick-two */
	SLIP_MASK_IDLE,		/* a task with a CPU mask: an idle CPU of the mask */
	SLIP_PREEMPT,		/* the LLC's queue; the hog on its previous CPU is preempted */
	SLIP_QUEUE_LLC,		/* the LLC's queue, by virtual time */
	SLIP_QUEUE_CPU,		/* a task bound to one CPU: that CPU's queue */
	SLIP_PATHS,
};

/* Counters. The first SLIP_PATHS are indexed by enum slip_path. */
enum slip_counter {
	SLIP_C_RAN_NEXT = SLIP_PATHS,	/* handoffs that ran when the waker left its CPU */
	SLIP_C_STOLEN,		/* handoffs stolen by another CPU */
	SLIP_C_HINT_LIED,	/* handoffs whose waker kept its CPU longer than waking an idle CPU takes */
	SLIP_C_HINT_REFUSED,	/* handoffs refused because of the waker's learned block time */
	SLIP_C_TICK_KICK,	/* idle CPUs kicked at the tick for a handoff that still waited */
	SLIP_C_FAR_PULL,	/* tasks that an idle CPU took from another LLC */
	SLIP_C_KEPT,		/* slices renewed because no other task wanted the CPU */
	SLIP_C_TRUSTED,		/* handoffs by trusted wakers, which other CPUs cannot steal */
	SLIP_C_MADE_ROOM,	/* wakers descheduled at the tick in favor of such a handoff */
	SLIP_C_REENQUEUED,	/* tasks taken back from a CPU that a real-time task took */
	SLIP_C_RESCUED,		/* idle CPUs that the timer woke for a waiting task */
	SLIP_C_AGED,		/* tasks that the timer sent to a CPU after a long wait */
	SLIP_C_BALANCED,	/* tasks taken from an LLC that is behind while others waited here too */
	SLIP_COUNTERS,
};

/* Tunables. slip_params_default() fills them in; a class may override slice and weight. */
struct slip_params {
	u64 slice_ns[SLIP_LEVELS];	/* slice of a weight-100 task, by level */
	u64 slice_min_ns;	/* minimum slice: below it switching costs too much */
	u64 slice_max_ns;	/* maximum slice: bounds the wait of an interactive task */
	u64 wake_idle_ns;	/* cost of waking an idle CPU; hand off only if the waker blocks sooner */
	u64 patience_ns;	/* a task that has waited this long may leave its LLC at once */
	u32 residency_runs;	/* runs on an LLC before a task may leave it */
	u32 slack_pct;		/* leave the LLC only if it is busier than the other by this much */
	u32 saturated_pct;	/* an LLC is saturated if at most this share of its CPUs idles ... */
	u32 relaxed_pct;	/* ... and no longer if at least this share does */
	u32 hand_off;		/* 0: no handoffs */
	u32 learn;		/* 0: follow every hint */
	u32 preempt;		/* 0: a wake-up never preempts a hog */
	u32 saturated_runs;	/* replaces residency_runs for a wakee whose LLC is saturated */
	u32 trust_after;	/* honest hints in a row that earn trust, see slip_trusted() */
	u32 llcs_per_node;	/* LLCs of a NUMA node have consecutive numbers; 0: nodes do not matter */
};

/* A task. Zeroed when created, then slip_task_init(). */
struct slip_task {
	u64 vtime;		/* weighted run time, ns at weight 100, on its domain's clock */
	u64 exec_ns;		/* CPU time charged so far */
	u64 queued_at;		/* time at which it last became runnable */
	u64 burst_ns;		/* CPU time since it last blocked */
	u64 sync_ns;		/* its CPU time at its first sync wake-up since then; 0 none */
	u64 block_ns;		/* learned: CPU time from its sync wake-ups until it leaves the CPU */
	u64 llc_mask;		/* LLCs that its class may use; 0 all */
	u64 slice_cap_ns;	/* maximum slice of its class; 0 none */
	u32 weight;
	u32 llc;
	u32 runs_on_llc;	/* consecutive runs on that LLC */
	u32 level;
	u32 handed;		/* the wakee of its sync wake-up was handed off: SLIP_HANDED_* */
	u32 honest;		/* honest hints in a row */
	u32 no_hand_off;	/* its class prefers an idle CPU to a handoff */
	u32 domain;		/* below SLIP_DOMAINS: of its LLC; else SLIP_DOMAINS + its only CPU */
	u32 queued;		/* it got its CPU in competition: from a queue, or against one */
	u32 pad;
};

#define SLIP_HANDED_OPEN	1u	/* an idle CPU may steal it */
#define SLIP_HANDED_TRUSTED	2u	/* in the CPU's own queue, see slip_trusted() */

/* A CPU. */
struct slip_cpu {
	u64 handover_at;	/* time of its last handoff */
	u32 llc;
	u32 bit;		/* its bit in its LLC's masks */
	u32 level;		/* level of the task that was running here at the last tick */
	u32 pad;
};

/*
 * Tasks that compete for the same CPUs: those without a mask, those of one mask, those of one CPU. Each
 * domain has its own clock, because virtual time passes at another rate if more tasks compete.
 * `offset` converts it to the LLC's clock, on which tasks of several domains are compared.
 *
 * A domain whose clock is more than a slice behind the LLC's is moved up as a whole. The shares inside
 * a domain are therefore those of the weights, whatever other domains do, and no domain gathers
 * more than a slice of credit against the others.
 */
struct slip_domain {
	u64 clock;		/* virtual time of the latest task that got a CPU in competition */
	u64 offset;
};

/* The CPUs that share a cache. */
struct slip_llc {
	u64 vclock;		/* virtual time of the most advanced domain */
	u64 base;		/* converts the clock of its tasks without a mask to one of all LLCs */
	u64 balance_at;		/* earliest time of its next slip_balance_lead() */
	u64 idle_mask;		/* bit per CPU */
	u64 handover_mask;	/* bit per CPU on which a handoff waits */
	u32 nr_cpus;
	u32 nr_queued;		/* tasks in the LLC's queue */
	u32 saturated;		/* with hysteresis, see slip_llc_update() */
	u32 overloaded;
};

/* The inputs of a placement. */
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

#define SLIP_WAKE_SYNC		1u	/* hint: the waker is about to block */
#define SLIP_WAKE_EXITING	2u	/* the waker is exiting */
#define SLIP_WAKE_WAKER_OK	4u	/* the wakee may run on the waker's CPU */
#define SLIP_WAKE_PREV_OK	8u	/* the wakee may run on its previous CPU */
#define SLIP_WAKE_MASKED	16u	/* the wakee may not run on every CPU */
#define SLIP_WAKE_SINGLE	32u	/* the wakee may run on one CPU only */

/* The decision. `cpu` is valid for all paths except those into the LLC's queue. */
struct slip_placement {
	u32 path;
	u32 cpu;
	u32 llc;
	u32 refused;		/* a handoff was refused because of the waker's learned block time */
};

/* Provided by the includer. "Claim" tests and clears the idle state, so that one claimant wins. */
struct slip_env;
static bool slip_env_claim_cpu(struct slip_env *env, u32 cpu);
static s32 slip_env_claim_core(struct slip_env *env, u32 llc);
static s32 slip_env_claim_thread(struct slip_env *env, u32 llc);
static s32 slip_env_claim_masked(struct slip_env *env);
static struct slip_llc *slip_env_llc(struct slip_env *env, u32 llc);

slip_inline u64 slip_max(u64 a, u64 b) { return a > b ? a : b; }
slip_inline u64 slip_min(u64 a, u64 b) { return a < b ? a : b; }

/* Virtual times wrap; their order is that of their difference. */
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
	p->llcs_per_node = 0;
}

/* ---- saturation -------------------------------------------------------------------------- */

/*
 * Update an LLC's flags; called when a CPU's idle state or the queue's length has changed.
 *
 * Saturated: (almost) no CPU idles. Overloaded: in addition, one task per CPU waits. Each flag has two
 * thresholds, or it would flip with every wake-up of an LLC of eight CPUs. The flags are written
 * without a lock: the next change corrects a late writer.
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

/* `clock`: the clock of the task's domain. */
slip_inline void slip_task_init(struct slip_task *t, u32 weight, u32 llc, u64 clock)
{
	t->vtime = clock;
	t->weight = weight ? weight : SLIP_WEIGHT;
	t->llc = llc;
	t->level = 0;
}

/* Not an array index, because the kernel's verifier would require a proof for each. */
slip_inline u64 slip_level_slice(const struct slip_params *p, u32 level)
{
	if (level == 0)
		return p->slice_ns[0];
	return level == 1 ? p->slice_ns[1] : p->slice_ns[SLIP_LEVELS - 1];
}

/* Slice of a task: by level and weight, shorter if many tasks wait, within bounds. */
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
 * Synchronizes a domain with its LLC: the LLC's clock is that of the most advanced domain, and no domain
 * is more than the longest slice behind. Stores, no additions: two CPUs that do it at once agree.
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
 * A task moves to another domain, because its mask changed or another LLC took it. It keeps its credit
 * or debt: credit up to the bound for a runnable task, debt up to a second.
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
 * Raises a runnable task's virtual time to a minimum, so that its credit is bounded. The bound is so large
 * that it does not affect tasks that compete with each other, whose order determines their shares. It is
 * for a task that cannot use its share, on one CPU, and for all others when the domain's clock leaps
 * because a task far in debt got a CPU that none of them may use.
 */
slip_inline void slip_bound_credit(struct slip_task *t, const struct slip_domain *d)
{
	u64 floor = d->clock - SLIP_LAG_MAX_NS;

	if (slip_before(t->vtime, floor))
		t->vtime = floor;
}

/* A task is about to be queued. */
slip_inline void slip_on_runnable(const struct slip_params *p, struct slip_task *t,
				  struct slip_llc *llc, struct slip_domain *d, u64 now)
{
	t->queued_at = now;
	t->queued = 1;
	slip_bound_credit(t, d);
	slip_domain_sync(p, llc, d);
}

/*
 * A task ran on a CPU that no other task wanted at that time. It earns no credit, and its debt is
 * bounded: by four of its slices, or one if that is more than half a second. A smaller bound would be
 * wrong on a CPU that is contended only at times, because of masks. A larger bound would make a light
 * task, which was alone on its CPU, wait for long.
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

/* The running task continues for another slice, because it comes before the queued ones. */
slip_inline void slip_on_turn(struct slip_task *t) { t->queued = 1; }

/*
 * Key in a queue: the task's virtual deadline on the LLC's clock, i.e. its virtual time
 * after one more slice. Among equals the task with the smaller slice goes first (as in EEVDF); the share
 * of the CPU depends on virtual time alone.
 */
slip_inline u64 slip_queue_key(const struct slip_task *t, const struct slip_domain *d, u64 slice)
{
	return t->vtime + d->offset + slice * SLIP_WEIGHT / (t->weight ? t->weight : 1);
}

/*
 * The running task, which has used `exec_ns` of CPU time in total, makes a wake-up with the sync
 * hint. The first one since it last blocked counts: its wakee waits for all later work of the waker.
 */
slip_inline void slip_on_sync_wake(struct slip_task *waker, u64 exec_ns)
{
	if (!waker->sync_ns)
		waker->sync_ns = exec_ns ? exec_ns : 1;
}

/*
 * Learns from a sync wake-up, once the waker has left its CPU. Returns true if the hint behind a
 * handoff was false: the waker ran for longer than waking an idle CPU takes.
 *
 * One very false hint (8 times the threshold, of which a quarter counts) is enough to refuse the next
 * one: a wakee that waits behind its waker loses far more than one that wakes an idle CPU. The cap
 * bounds the number of honest hints until the waker's hints are followed again.
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

/* Charges a task for the CPU time that it has used up to `exec_ns`. Returns the new part. */
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
 * Accounts for a task's activity since the last call: when it wakes up (`blocked`), and when
 * its slice has ended or it was preempted. It has used `exec_ns` of CPU time in total, most recently on
 * LLC `id`, where `d` is its domain; `from` is its domain on its previous LLC.
 *
 * Nothing is called when a task gets or leaves a CPU: those are the hottest moments of a
 * handoff, and the kernel counts CPU time anyway. Returns the result of slip_learn().
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
		/* A task that keeps its CPU turn after turn is never queued, where its credit is bounded too. */
		slip_bound_credit(t, d);
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
 * May the task leave its LLC? Yes, if it ran there often enough to repay the cache refill, or has
 * waited long enough. A wakee whose LLC is saturated needs fewer runs: it would wait for
 * another task's slice to end, which costs more than another cache refill.
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
 * May the wakee have its waker's CPU? Only with the hint, and only if no other task waits:
 * then the CPU changes tasks without an interrupt or an idle exit. The waker's learned block time
 * is checked last, so that `refused` means that it decided.
 *
 * A wakee from another LLC, `home`, is accepted only if the waker's LLC is no busier. A waker often wakes
 * many tasks: without this condition they all gathered around it and then waited for each other.
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
 * The less loaded of two random LLCs other than `home`, or -1; `busiest`: the more loaded. Two choices suffice to keep
 * the fullest queue short: Mitzenmacher, "The power of two choices in randomized load balancing" (2001).
 *
 * If the host has NUMA nodes of several LLCs, the first of the two is of home's node. It is chosen unless the other
 * one is much better, or the only one with an idle CPU (`busiest`: with a waiting task).
 */
slip_inline s32 slip_pick_two(const struct slip_params *p, struct slip_env *env,
			      const struct slip_task *t, u32 home, u32 nr_llcs, u64 rnd,
			      bool busiest)
{
	u32 i, j, first, per_node = p->llcs_per_node, slack = 100;
	struct slip_llc *a, *b;
	bool a_ok, b_ok, a_has, b_has;

	if (nr_llcs < 2)
		return -1;
	/* Draw from the others: an offset of 1 .. nr_llcs - 1. */
	i = (home + 1 + (u32)(rnd & 0xffffffff) % (nr_llcs - 1)) % nr_llcs;
	j = (home + 1 + (u32)(rnd >> 32) % (nr_llcs - 1)) % nr_llcs;
	if (per_node > 1 && per_node < nr_llcs) {
		first = home - home % per_node;
		i = first + (home - first + 1 + (u32)(rnd & 0xffffffff) % (per_node - 1)) % per_node;
		if (j / per_node != home / per_node)
			slack = 100 + SLIP_NODE_SLACK_PCT;
	}
	a_ok = !t || slip_llc_ok(t, i);
	b_ok = !t || slip_llc_ok(t, j);
	a = slip_env_llc(env, i);
	b = slip_env_llc(env, j);
	if (!a || !a_ok)
		return b && b_ok ? (s32)j : -1;
	if (!b || !b_ok)
		return (s32)i;
	if (slack > 100) {
		a_has = busiest ? a->nr_queued : !!a->idle_mask;
		b_has = busiest ? b->nr_queued : !!b->idle_mask;
		if (a_has != b_has)
			return (s32)(a_has ? i : j);
	}
	if (busiest)
		return (s32)((u64)slip_llc_load(b) * 100 > (u64)slip_llc_load(a) * slack ? j : i);
	return (s32)((u64)slip_llc_load(b) * slack < (u64)slip_llc_load(a) * 100 ? j : i);
}

/* Is `home` busier than `other` by more than the slack? */
slip_inline bool slip_worth_moving(const struct slip_params *p, const struct slip_llc *home,
				   const struct slip_llc *other)
{
	return (u64)slip_llc_load(home) * 100 > (u64)slip_llc_load(other) * (100 + p->slack_pct);
}

/*
 * Places a task that wakes up. Claims the idle CPU that it returns.
 *
 *   1  its waker's CPU         slip_may_hand_off()
 *   2  the CPU it last ran on, if idle
 *   3  an idle core, then an idle thread, of its LLC
 *   4  an idle CPU of the less loaded of two other LLCs, if it may leave and the load differs enough
 *   5  its LLC's queue; a hog on its previous CPU yields to an interactive task
 *
 * The caller reads `prev_task_level` from the previous CPU's state (SLIP_LEVELS: unknown).
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

	/* A task whose class may not use its previous LLC is sent to the first allowed one. */
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
		/* It waits in the queue of its previous LLC; any CPU of its mask takes it. */
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
		far = slip_pick_two(p, env, wakee, home_id, w->nr_llcs, w->rnd, 0);
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
 * A waker with `trust_after` honest hints in a row is trusted: its handoffs go into
 * the CPU's own queue. That is the shortest path, but no other CPU can steal from there.
 * If the waker does not block this time, the tick deschedules it (slip_tick_wants_room()), and its trust
 * starts from zero. All other handoffs wait in queues from which an idle CPU may steal them.
 */
slip_inline bool slip_trusted(const struct slip_params *p, const struct slip_task *waker)
{
	return p->learn && waker->honest >= p->trust_after;
}

/* Records a handoff to `cpu`. Returns whether it goes into the CPU's own queue. */
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

/* The handoff on `cpu` was taken, by this CPU or another. */
slip_inline void slip_handover_taken(struct slip_llc *llc, const struct slip_cpu *cpu)
{
	__sync_fetch_and_and(&llc->handover_mask, ~slip_bit(cpu->bit));
}

/* At the tick: has this CPU's handoff waited so long that an idle CPU should steal it? */
slip_inline bool slip_tick_wants_kick(const struct slip_params *p, const struct slip_llc *llc,
				      const struct slip_cpu *cpu, u64 now)
{
	return (llc->handover_mask & slip_bit(cpu->bit)) && now > cpu->handover_at &&
	       now - cpu->handover_at >= p->wake_idle_ns;
}

/*
 * At the tick of the task that runs on `cpu`: should it yield to the task that it handed off,
 * trusted, so long ago? The running task is queued again, and any CPU may take it.
 */
slip_inline bool slip_tick_wants_room(const struct slip_params *p, const struct slip_task *running,
				      const struct slip_cpu *cpu, u64 now)
{
	return running->handed == SLIP_HANDED_TRUSTED && now > cpu->handover_at &&
	       now - cpu->handover_at >= p->wake_idle_ns;
}

/*
 * At the tick, tasks wait in LLC `home`: the other LLC whose idle CPU should pull from it, or -1.
 * Without it, a queue could persist next to an idle LLC until a CPU there next became idle.
 */
slip_inline s32 slip_tick_far(const struct slip_params *p, struct slip_env *env, u32 home,
			      u32 nr_llcs, u64 rnd)
{
	struct slip_llc *llc = slip_env_llc(env, home), *other;
	s32 far;

	if (!llc || !llc->nr_queued || llc->idle_mask)
		return -1;
	far = slip_pick_two(p, env, 0, home, nr_llcs, rnd, 0);
	other = far >= 0 ? slip_env_llc(env, (u32)far) : 0;
	return other && other->idle_mask && slip_worth_moving(p, llc, other) ? far : -1;
}

/* ---- balance by what tasks are due ------------------------------------------------------- */

/*
 * While tasks wait in two LLCs, virtual time passes more slowly in the one with more weight per CPU: its
 * tasks get less than they are due. An LLC that is ahead takes a waiting task from one that is behind. The
 * task keeps its place on the common clock, so it is served until it has caught up. If no distribution
 * of the tasks is even, tasks thus take turns on the faster LLC.
 */

/*
 * Is it time for LLC `llc` to compare itself with others? At random intervals, because regular ones can fall in step
 * with idle CPUs that pull tasks back. About one slice in 16 is for a task of another LLC.
 */
slip_inline bool slip_balance_due(const struct slip_params *p, struct slip_llc *llc, u64 now, u64 rnd)
{
	u64 mean = 16 * p->slice_ns[SLIP_LEVELS - 1] / slip_max(llc->nr_cpus, 1);

	if (!llc->nr_queued || slip_before(now, llc->balance_at))
		return 0;
	mean = slip_max(mean, 2 * p->slice_min_ns);
	llc->balance_at = now + mean / 2 + rnd % mean;
	return 1;
}

/*
 * By how much LLC `llc` is ahead of `other`, virtual ns; negative if it is behind. `d` and `od` are their domains
 * of tasks without a mask. An LLC in which no task waits is not behind; the others are so by at most a
 * runnable task's credit. What is beyond that is forgotten.
 */
slip_inline s64 slip_balance_lead(struct slip_llc *llc, const struct slip_domain *d,
				  struct slip_llc *other, const struct slip_domain *od)
{
	s64 lead = (s64)(d->clock + llc->base - od->clock - other->base);
	s64 most = other->nr_queued ? (s64)SLIP_LAG_MAX_NS : 0;

	if (lead > most) {
		other->base += (u64)(lead - most);
		return most;
	}
	if (lead < -(s64)SLIP_LAG_MAX_NS) {
		llc->base -= (u64)(lead + (s64)SLIP_LAG_MAX_NS);
		return -(s64)SLIP_LAG_MAX_NS;
	}
	return lead;
}

/* Is an LLC so far ahead that it takes a task? Slices alone cause a smaller difference. */
slip_inline bool slip_balance_wants(const struct slip_params *p, s64 lead)
{
	return lead > 2 * (s64)p->slice_max_ns;
}

/*
 * A task without a mask was taken by LLC `to`, which was ahead by `lead`. Its credit or debt is that on the common
 * clock.
 */
slip_inline void slip_balance_moved(struct slip_task *t, u32 to, const struct slip_domain *from,
				    const struct slip_domain *d, s64 lead)
{
	slip_change_domain(t, from, d);
	t->vtime -= (u64)lead;
	t->llc = to;
	t->runs_on_llc = 0;
}

/* ---- dispatch ---------------------------------------------------------------------------- */

/* Sources of work for a CPU. */
enum slip_source {
	SLIP_FROM_HANDOVER = 0,	/* the task handed off to this CPU */
	SLIP_FROM_CPU,		/* tasks bound to this CPU */
	SLIP_FROM_LLC,		/* the LLC's queue: the first task that may run here */
	SLIP_FROM_NONE,		/* no task here: try other CPUs' handoffs, then other LLCs */
	SLIP_FROM_PREV,		/* the running task continues: its slice ended, its turn did not */
};

struct slip_heads {
	u64 cpu_key;		/* key of the first task in the CPU's own queue */
	u64 llc_key;		/* key of the first task in the LLC's queue */
	u64 prev_key;		/* key that the running task would have if it were queued now */
	u32 has_handover;
	u32 has_cpu;
	u32 has_llc;
	u32 has_prev;		/* the running task can continue; it is in no queue yet */
};

/*
 * The queue to take from next. The handoff goes first: no task was waiting when it was made, so
 * at most one task runs ahead of later arrivals. Otherwise by virtual time. The running task
 * competes with the queued ones: if it always yielded, a heavy task would get every other slice.
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
 * The bit of the next other CPU of the LLC, after `bit`, with a waiting handoff; 64 if none.
 * Starting after the CPU's own bit spreads the steals. The caller clears bits from `mask` as it tries,
 * at most SLIP_STEAL_TRIES times.
 */
slip_inline u32 slip_next_handover(u64 mask, u32 bit)
{
	u64 others = mask & ~slip_bit(bit);
	u64 after = others & ~(slip_bit(bit) | (slip_bit(bit) - 1));

	return slip_lowest_bit(after ? after : others);
}

/*
 * May another CPU steal the handoff that waits on `victim`? Not while its waker may still
 * block soon: a stolen handoff loses its advantage.
 */
slip_inline bool slip_may_steal(const struct slip_params *p, const struct slip_cpu *victim, u64 now)
{
	return now > victim->handover_at && now - victim->handover_at >= p->wake_idle_ns;
}

/*
 * The LLC that an idle CPU of `home` should pull from, or -1: the more loaded of two others, if
 * tasks wait there.
 */
slip_inline s32 slip_pull_from(const struct slip_params *p, struct slip_env *env, u32 home,
			       u32 nr_llcs, u64 rnd)
{
	s32 far = slip_pick_two(p, env, 0, home, nr_llcs, rnd, 1);
	struct slip_llc *llc = far >= 0 ? slip_env_llc(env, (u32)far) : 0;

	return llc && llc->nr_queued ? far : -1;
}

#endif /* SLIP_POLICY_H */
