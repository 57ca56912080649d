/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * scx_slipstream: the placement policy of slip_policy.h on a running kernel.
 *
 * Queues (DSQs): one per LLC, ordered by virtual deadline, for all tasks that more than one CPU may
 * run; one per CPU, with the same order, for tasks bound to that CPU; one per CPU for the task that was
 * handed off to it. The last is not SCX_DSQ_LOCAL, from which no other CPU could steal it. When a CPU
 * takes the first task of an LLC's queue, the kernel skips those whose mask excludes that CPU.
 *
 * No task waits while a CPU of its mask is idle:
 *
 * - A CPU that queues a task looks for an idle CPU of its mask. The kick that wakes it is carried out
 *   by an interrupt after the insertion. (The insertion itself takes place after ops.enqueue has
 *   returned; nothing in ops.enqueue may rely on it.)
 * - A CPU that becomes idle compares its LLC's `put` with the value before it last looked for work.
 * - The CPU that a task last ran on, on whose run queue the kernel counts it, looks for work when its
 *   own task leaves or its slice ends.
 * - At each tick, and by a timer if no CPU has sched_ext ticks, queues are compared with idle CPUs.
 *
 * Decisions are in the header; this file has the maps, the kernel's queues and the callbacks.
 */
#include "kernel.h"
#include "slip_policy.h"
#include "intf.h"

char _license[] SEC("license") = "GPL";

#define DSQ_CPU		0x10000ull	/* + cpu: tasks bound to it */
#define DSQ_HANDOVER	0x20000ull	/* + cpu: the task handed off to it */
#define BALANCE_LOOKS	8	/* tasks of another LLC's queue that the balance by share examines */
#define PEEKS		8	/* tasks of its LLC's queue that a CPU examines for one it may run */
#define AGED_LOOKS	4	/* last tasks of a queue of which one may have waited too long */
#define RESCUE_NS	2000000ull	/* between two searches of one queue for tasks that an idle CPU may run */
#define RECLASSIFY_NS	100000000ull	/* after which a task's cgroup is looked up again */
#define TIMER_NS	100000000ull
#define REAL_TIME_MS	10000u	/* for which a long run of a real-time task is remembered */
#define AGED_NS		2000000000ull	/* a task that has waited this long goes ahead of the order */

struct task_ctx {
	struct slip_task t;
	u64 comm[2];		/* the name at its last classification */
	u64 classed_at;
	u32 class_weight;	/* 0: by nice value */
	u32 path;		/* placement, from select_cpu to enqueue */
	u32 llc;
	u32 selected;		/* select_cpu saw this wake-up */
	u32 accounted;		/* ops.dispatch has accounted for its run, ops.enqueue need not */
	u32 claimed;		/* 1 + the idle CPU claimed to take it from the queue; 0 none */
};

/*
 * Globals instead of maps: a wake-up costs a few thousand instructions in total, and each map
 * look-up some tens. The configuration is read-only once loaded, so the verifier drops code that it
 * disables.
 */
const volatile struct slip_config slip_config SEC(".rodata.config");
struct slip_cpu_state slip_cpus[SLIP_CPUS_MAX] SEC(".data.cpus");
struct slip_llc_state slip_llcs[SLIP_LLCS_MAX] SEC(".data.llcs");
struct slip_mask slip_masks[SLIP_DOMAINS];
u32 slip_real_time_at;	/* end of the last long run of a real-time task, by coarse(); 0: none */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SLIP_RULES_MAX);
	__type(key, u32);
	__type(value, struct slip_rule);
} slip_rules SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SLIP_CLASSES_MAX);
	__type(key, u32);
	__type(value, struct slip_class);
} slip_classes SEC(".maps");

/* Class of each cgroup; the loader keeps it up to date. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, u64);
	__type(value, u32);
} slip_cgroups SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct task_ctx);
} slip_tasks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SLIP_COUNTERS);
	__type(key, u32);
	__type(value, u64);
} slip_stats SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct slip_exit);
} slip_exit SEC(".maps");

struct timer_slot {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct timer_slot);
} slip_timer SEC(".maps");

/* Readable once slip_exit is filled in: the loader waits for it. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} slip_exited SEC(".maps");

struct slip_env {
	struct task_struct *p;
};

/* Not just a cast: without `volatile` the compiler would assume the zeros of the source. */
static __always_inline const struct slip_params *params(void)
{
	const struct slip_params *p = (const struct slip_params *)&slip_config.params;

	barrier_var(p);
	return p;
}

static __always_inline struct slip_cpu_state *cpu_of(u32 cpu)
{
	return &slip_cpus[cpu & (SLIP_CPUS_MAX - 1)];
}

static __always_inline struct slip_llc_state *llc_of(u32 id)
{
	return &slip_llcs[id & (SLIP_LLCS_MAX - 1)];
}

/*
 * Whether tasks bound to this CPU may be queued, without a call of the kernel. They are queued, with
 * the insertion, under the CPU's run queue lock, and the CPU looks for work under the same lock. Unlike
 * an LLC's queue, this one can therefore be counted.
 */
static __always_inline bool has_bound(struct slip_cpu_state *c)
{
	return c->bound_put != c->bound_empty_at;
}

static __always_inline bool take_bound(struct slip_cpu_state *c, s32 cpu)
{
	u32 put = c->bound_put;

	if (put == c->bound_empty_at)
		return 0;
	if (scx_bpf_dsq_move_to_local(DSQ_CPU + cpu))
		return 1;
	if (scx_bpf_dsq_nr_queued(DSQ_CPU + cpu) <= 0)
		c->bound_empty_at = put;
	return 0;
}

/*
 * The CPU of a bit below 64. The compiler infers the bound from slip_lowest_bit() and drops a
 * plain mask. The verifier does not infer it, so the bound must be hidden from the compiler.
 */
static __always_inline u32 cpu_of_bit(struct slip_llc_state *llc, u32 bit)
{
	barrier_var(bit);
	return llc->cpu_of_bit[bit & 63];
}

/* A task's domain on LLC `id`. */
static __always_inline struct slip_domain *domain_of(const struct slip_task *t, u32 id)
{
	u32 domain = t->domain;

	/* As in cpu_of_bit(): the masks are for the verifier. */
	barrier_var(domain);
	if (domain >= SLIP_DOMAINS) {
		domain -= SLIP_DOMAINS;
		barrier_var(domain);
		return &cpu_of(domain)->own;
	}
	return &llc_of(id)->domains[domain & (SLIP_DOMAINS - 1)];
}

/*
 * Whether a task must stay on its CPU until it leaves a section of the kernel. The entry code of a BPF program counts
 * as such a section of the current task on most kernels; `entries` of ours are nested here. Where it does not count,
 * a current task in a real section is missed: it waits in a queue from which only its CPU takes it.
 */
static __always_inline bool is_pinned(struct task_struct *p, u32 entries)
{
	if (!bpf_core_field_exists(p->migration_disabled) || !p->migration_disabled)
		return 0;
	return p->migration_disabled > entries || p != bpf_get_current_task_btf();
}

static __always_inline void count(u32 counter)
{
	u64 *n = bpf_map_lookup_elem(&slip_stats, &counter);

	if (n)
		(*n)++;
}

static __always_inline struct task_ctx *task_of(struct task_struct *p)
{
	return bpf_task_storage_get(&slip_tasks, p, NULL, 0);
}

/* Random enough to pick LLCs, and cheaper than the kernel's generator. */
static __always_inline u64 random_word(u64 now, u32 cpu)
{
	return slip_mix(now ^ (u64)cpu << 48);
}

/* ---- the policy's slip_env_*() functions --------------------------------------------------- */

static __always_inline struct slip_llc *slip_env_llc(struct slip_env *env, u32 id)
{
	(void)env;
	/* `nr_queued` is as old as the last read of the queue's length; only heuristics use it. */
	return id < slip_config.nr_llcs ? &llc_of(id)->llc : NULL;
}

/* Sets the length of an LLC's queue, and the flags that follow from it. */
static __always_inline void set_queued(struct slip_llc_state *s, u32 queued)
{
	if (queued != s->llc.nr_queued) {
		s->llc.nr_queued = queued;
		slip_llc_update(params(), &s->llc);
	}
}

static __always_inline u32 look_queued(struct slip_llc_state *s, u32 id)
{
	u32 queued = (u32)slip_max(0, (s64)scx_bpf_dsq_nr_queued(id));

	set_queued(s, queued);
	return queued;
}

/* Takes the first task of an LLC's queue that this CPU may run. */
static __always_inline bool take_llc(struct slip_llc_state *s, u32 id)
{
	if (scx_bpf_dsq_move_to_local(id)) {
		if (s->llc.nr_queued)
			look_queued(s, id);
		return 1;
	}
	if (s->llc.nr_queued)
		look_queued(s, id);
	return 0;
}

/*
 * Whether a real-time task runs on a CPU, or is about to. A CPU that it wakes from idle is still idle
 * in the kernel's mask until it switches. A task in that CPU's local queue then waits until the
 * real-time task sleeps: the kernel calls ops.cpu_release only if a task of ours had the CPU, and
 * nothing else takes tasks out of a local queue.
 */
static __always_inline bool has_real_time(u32 cpu)
{
	const struct rq *rq = bpf_per_cpu_ptr(&runqueues, cpu);

	return rq && rq->rt.rt_nr_running;
}

/* Time in units of about a millisecond, never 0. */
static __always_inline u32 coarse(u64 now) { return (u32)(now >> 20) | 1; }

/*
 * Whether a real-time task recently kept some CPU for a millisecond or more. It may be back, on any CPU,
 * before an idle CPU that we wake has left its idle state. During that time tasks are not put into local
 * queues: they wait in queues from which other CPUs can take them.
 */
static __always_inline bool had_real_time(u64 now)
{
	u32 at = slip_real_time_at;

	return at && coarse(now) - at < REAL_TIME_MS;
}

static __always_inline bool slip_env_claim_cpu(struct slip_env *env, u32 cpu)
{
	struct slip_cpu *c = &cpu_of(cpu)->cpu;

	(void)env;
	if (!scx_bpf_test_and_clear_cpu_idle(cpu))
		return 0;
	__sync_fetch_and_and(&llc_of(c->llc)->llc.idle_mask, ~slip_bit(c->bit));
	return !has_real_time(cpu);
}

/*
 * Claims a CPU of `mask`. The kernel's bit decides, and only its winner clears ours. If ours were
 * cleared first, a CPU that has set ours and not yet the kernel's would be idle and not be found.
 */
static __always_inline s32 claim_of(struct slip_llc_state *s, u64 mask)
{
	u32 cpu, bit, i;

	for (i = 0; i < 3; i++) {
		bit = slip_lowest_bit(mask);
		if (bit >= 64)
			return -1;
		cpu = cpu_of_bit(s, bit);
		if (scx_bpf_test_and_clear_cpu_idle(cpu)) {
			__sync_fetch_and_and(&s->llc.idle_mask, ~slip_bit(bit));
			if (!has_real_time(cpu))
				return (s32)cpu;
		}
		mask &= ~slip_bit(bit);
	}
	return -1;
}

static s32 slip_env_claim_core(struct slip_env *env, u32 id)
{
	struct slip_llc_state *s = llc_of(id);
	u64 idle = s->llc.idle_mask;

	(void)env;
	return claim_of(s, (idle & idle >> 1 & s->pair_first) | (idle & s->single));
}

static s32 slip_env_claim_thread(struct slip_env *env, u32 id)
{
	struct slip_llc_state *s = llc_of(id);

	(void)env;
	return claim_of(s, s->llc.idle_mask);
}

/* Claims an idle CPU of a task's mask: on an idle core if there is one. */
static __always_inline s32 claim_in(const struct cpumask *mask)
{
	s32 cpu = scx_bpf_pick_idle_cpu(mask, SCX_PICK_IDLE_CORE);
	struct slip_cpu *c;

	if (cpu < 0)
		cpu = scx_bpf_pick_idle_cpu(mask, 0);
	if (cpu < 0)
		return -1;
	c = &cpu_of(cpu)->cpu;
	__sync_fetch_and_and(&llc_of(c->llc)->llc.idle_mask, ~slip_bit(c->bit));
	return has_real_time(cpu) ? -1 : cpu;
}

static s32 slip_env_claim_masked(struct slip_env *env)
{
	return env->p ? claim_in(env->p->cpus_ptr) : -1;
}

/* ---- classes ------------------------------------------------------------------------------ */

static __always_inline u32 class_by_name(const u64 *comm)
{
	u32 i;

	bpf_for(i, 0, SLIP_RULES_MAX) {
		u32 at = i;
		struct slip_rule *r;

		if (at >= slip_config.nr_rules)
			break;
		r = bpf_map_lookup_elem(&slip_rules, &at);
		if (r && (comm[0] & r->mask[0]) == r->name[0] && (comm[1] & r->mask[1]) == r->name[1])
			return r->class;
	}
	return SLIP_NO_CLASS;
}

/*
 * Finds a task's class again when its name has changed, and each RECLASSIFY_NS, because it may change
 * cgroups and the loader adds new ones. Called wherever a task is placed, queued or continued.
 */
static __always_inline void classify(struct task_struct *p, struct task_ctx *tc, u64 now)
{
	u64 comm[2];
	u32 id;
	struct slip_class *class;

	if (!slip_config.nr_rules && !slip_config.cgroup_rules)
		return;
	__builtin_memset(comm, 0, sizeof(comm));
	bpf_probe_read_kernel_str(comm, sizeof(comm), p->comm);
	if (comm[0] == tc->comm[0] && comm[1] == tc->comm[1] && tc->classed_at &&
	    now - tc->classed_at < RECLASSIFY_NS)
		return;
	tc->comm[0] = comm[0];
	tc->comm[1] = comm[1];
	tc->classed_at = now;
	id = class_by_name(comm);
	if (id == SLIP_NO_CLASS && slip_config.cgroup_rules) {
		u64 cgroup = BPF_CORE_READ(p, cgroups, dfl_cgrp, kn, id);
		u32 *found = bpf_map_lookup_elem(&slip_cgroups, &cgroup);

		if (found)
			id = *found;
	}
	class = id == SLIP_NO_CLASS ? NULL : bpf_map_lookup_elem(&slip_classes, &id);
	tc->t.llc_mask = class ? class->llc_mask : 0;
	tc->t.slice_cap_ns = class ? class->slice_cap_ns : 0;
	tc->t.no_hand_off = class ? class->no_hand_off : 0;
	tc->class_weight = class ? class->weight : 0;
}

/* As in cpu_of_bit(): the mask is for the verifier. */
static __always_inline struct slip_mask *mask_of(u32 domain)
{
	barrier_var(domain);
	return &slip_masks[domain & (SLIP_DOMAINS - 1)];
}

/*
 * The domain of a mask of several CPUs, by the hash of its bits; counts one more task in it. If more masks
 * are in use than there are domains, some share one. Its clock is then that of the mask that gets more of
 * its CPUs, and the shares of the other masks' tasks are no longer those of their weights.
 */
__attribute__((noinline)) u32 slip_join_mask(u64 hash)
{
	u32 at, i, unused = 0, start = (u32)(hash % (SLIP_DOMAINS - 1));
	u64 was;

	bpf_for(i, 0, SLIP_DOMAINS - 1) {
		at = 1 + (start + i) % (SLIP_DOMAINS - 1);
		if (mask_of(at)->hash == hash) {
			__sync_fetch_and_add(&mask_of(at)->tasks, 1);
			return at;
		}
		if (!unused && !mask_of(at)->tasks)
			unused = at;
	}
	at = unused ? unused : 1 + start;
	was = mask_of(at)->hash;
	/* Another CPU may take it for another mask at the same time: then they share it. */
	if (unused)
		__sync_val_compare_and_swap(&mask_of(at)->hash, was, hash);
	__sync_fetch_and_add(&mask_of(at)->tasks, 1);
	return at;
}

static __always_inline void leave_mask(u32 domain)
{
	if (domain && domain < SLIP_DOMAINS)
		__sync_fetch_and_add(&mask_of(domain)->tasks, -1);
}

/* Joins the domain of a task's CPU mask, and returns it. */
static __always_inline u32 join_domain(struct task_struct *p)
{
	const struct cpumask *mask = p->cpus_ptr;
	u64 hash = 0;
	u32 i, lacks = 0;

	if (p->nr_cpus_allowed == 1)
		return SLIP_DOMAINS + (bpf_cpumask_first(mask) & (SLIP_CPUS_MAX - 1));
	bpf_for(i, 0, SLIP_CPUS_MAX / 64) {
		u64 word = 0, online = slip_config.online[i & (SLIP_CPUS_MAX / 64 - 1)];

		if (!online)
			continue;
		bpf_probe_read_kernel(&word, sizeof(word), &mask->bits[i]);
		lacks |= (online & ~word) != 0;
		hash = slip_mix(hash ^ (online & word));
	}
	return lacks ? slip_join_mask(hash | 1) : 0;
}

static __always_inline bool is_masked(const struct task_ctx *tc)
{
	return tc->t.domain != 0;
}

/* Accounts in the policy for `p` since it last woke or was queued. */
static __always_inline void account(struct task_struct *p, struct task_ctx *tc,
				    struct slip_cpu *last, bool blocked)
{
	struct slip_domain *d = domain_of(&tc->t, last->llc);
	u32 was = tc->t.llc;

	tc->t.weight = tc->class_weight ? tc->class_weight : p->scx.weight;
	if (slip_account(params(), &tc->t, last->llc, &llc_of(last->llc)->llc,
			 was == last->llc ? d : domain_of(&tc->t, was), d,
			 p->se.sum_exec_runtime, blocked))
		count(SLIP_C_HINT_LIED);
}

/* CPU time that the running task has used by `now`; the kernel's count is as of its last tick. */
static __always_inline u64 exec_now(struct task_struct *current, const struct rq *rq, u64 now)
{
	return current->se.sum_exec_runtime + (now - (rq->clock - rq->clock_task)) -
	       current->se.exec_start;
}

/* ---- operations --------------------------------------------------------------------------- */

SEC("struct_ops/slip_select_cpu")
s32 BPF_PROG(slip_select_cpu, struct task_struct *p, s32 prev_cpu, u64 wake_flags)
{
	struct task_ctx *tc = task_of(p), *waker = NULL;
	struct slip_env env = { .p = p };
	struct slip_placement to;
	struct slip_wake w;
	struct slip_cpu *prev, *here;
	struct slip_llc *llc;
	u64 slice;

	if (!tc)
		return prev_cpu;
	w.now = scx_bpf_now();
	w.waker_cpu = bpf_get_smp_processor_id();
	w.prev_cpu = prev_cpu;
	prev = &cpu_of(prev_cpu)->cpu;
	here = &cpu_of(w.waker_cpu)->cpu;
	if (here->llc >= slip_config.nr_llcs)
		return prev_cpu; /* this CPU has come online, and the loader is about to load us again */
	if (prev->llc >= slip_config.nr_llcs) {
		/* The CPU it last ran on was offline when we were loaded; a sleeping task stays assigned to it. */
		w.prev_cpu = prev_cpu = w.waker_cpu;
		prev = here;
	}
	classify(p, tc, w.now);
	account(p, tc, prev, 1);
	tc->t.queued_at = w.now;
	w.rnd = random_word(w.now, w.waker_cpu);
	w.waker_llc = here->llc;
	w.prev_llc = prev->llc;
	w.nr_llcs = slip_config.nr_llcs;
	w.waker_queued = 0;
	w.flags = 0;
	if (is_masked(tc)) {
		w.flags |= SLIP_WAKE_MASKED;
		if (bpf_cpumask_test_cpu(w.waker_cpu, p->cpus_ptr))
			w.flags |= SLIP_WAKE_WAKER_OK;
		if (bpf_cpumask_test_cpu(prev_cpu, p->cpus_ptr))
			w.flags |= SLIP_WAKE_PREV_OK;
	} else {
		w.flags |= SLIP_WAKE_WAKER_OK | SLIP_WAKE_PREV_OK;
	}
	if (wake_flags & SCX_WAKE_SYNC) {
		struct task_struct *current = bpf_get_current_task_btf();

		/* A hint with the idle task as waker comes from an interrupt: the idle task does not block. */
		if (current->pid)
			waker = task_of(current);
		if (waker) {
			const struct rq *rq = bpf_this_cpu_ptr(&runqueues);

			w.flags |= SLIP_WAKE_SYNC;
			if (current->flags & PF_EXITING)
				w.flags |= SLIP_WAKE_EXITING;
			slip_on_sync_wake(&waker->t, exec_now(current, rq, w.now));
			/* Tasks bound to this CPU, and others that last ran here and now wait in some queue. */
			w.waker_queued = rq->nr_running - 1;
		}
	}
	slip_place(params(), &env, &tc->t, waker ? &waker->t : NULL, &w, prev->level, &to);
	if (to.path < SLIP_COUNTERS)
		count(to.path);
	if (to.refused)
		count(SLIP_C_HINT_REFUSED);
	if (to.path >= SLIP_PREEMPT) {
		tc->path = to.path;
		tc->llc = to.llc;
		tc->selected = 1;
		return prev_cpu;
	}
	if (to.path != SLIP_HANDOFF && had_real_time(w.now)) {
		tc->path = SLIP_QUEUE_LLC;
		tc->llc = to.llc;
		tc->selected = 1;
		tc->claimed = to.cpu + 1;
		return prev_cpu;
	}
	llc = &llc_of(to.llc)->llc;
	slice = slip_slice(params(), &tc->t, llc);
	if (to.path == SLIP_HANDOFF && waker) {
		if (slip_handover_put(params(), llc, here, &waker->t, w.now)) {
			count(SLIP_C_TRUSTED);
			scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice, 0);
		} else {
			scx_bpf_dsq_insert(p, DSQ_HANDOVER + to.cpu, slice, 0);
		}
	} else {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, slice, 0);
	}
	return to.cpu;
}

/*
 * Wakes a claimed CPU, to take a task from LLC `from`. Not SCX_KICK_IDLE: the kernel drops
 * such a kick if the CPU is not idle at that moment, though it may be past its look for work.
 */
static __always_inline void kick_for(s32 cpu, u32 from)
{
	struct slip_cpu_state *c = cpu_of(cpu);

	if (c->cpu.llc != from)
		c->pull_hint = from + 1;
	scx_bpf_kick_cpu(cpu, 0);
}

/* Wakes an idle CPU for a task that waits, or is about to, in LLC `id`'s queue. */
static __always_inline bool kick_idle(struct task_struct *p, const struct task_ctx *tc, u32 id)
{
	struct slip_env env = { .p = p };
	s32 cpu;

	if (is_masked(tc))
		cpu = claim_in(p->cpus_ptr);
	else
		cpu = llc_of(id)->llc.idle_mask ? slip_env_claim_thread(&env, id) : -1;
	if (cpu < 0)
		return 0;
	kick_for(cpu, id);
	return 1;
}

SEC("struct_ops/slip_enqueue")
void BPF_PROG(slip_enqueue, struct task_struct *p, u64 enq_flags)
{
	struct task_ctx *tc = task_of(p);
	u32 cpu = scx_bpf_task_cpu(p), id, claimed;
	struct slip_cpu_state *c = cpu_of(cpu);
	struct slip_llc_state *s;
	struct slip_domain *d;
	u64 slice, key, now;
	bool placed;

	id = c->cpu.llc;
	if (!tc || id >= slip_config.nr_llcs) {
		/* Unknown to us: the built-in queue loses no task. */
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, 1000000, enq_flags);
		return;
	}
	now = scx_bpf_now();
	/* select_cpu is not called for tasks bound to one CPU. */
	placed = tc->selected && (enq_flags & SCX_ENQ_WAKEUP);
	/* Also for a new task, which has no SCX_ENQ_WAKEUP: else the claimed CPU would idle forever. */
	claimed = tc->claimed;
	tc->selected = 0;
	tc->claimed = 0;
	if (tc->accounted && !(enq_flags & SCX_ENQ_WAKEUP)) {
		slip_charge(&tc->t, p->se.sum_exec_runtime);
	} else if (!placed) {
		classify(p, tc, now);
		account(p, tc, &c->cpu, enq_flags & SCX_ENQ_WAKEUP);
	}
	tc->accounted = 0;
	if (placed && !is_masked(tc))
		id = tc->llc;
	else if (!is_masked(tc) && !slip_llc_ok(&tc->t, id) &&
		 slip_lowest_bit(tc->t.llc_mask) < slip_config.nr_llcs)
		id = slip_lowest_bit(tc->t.llc_mask); /* its class has changed */
	s = llc_of(id);
	d = domain_of(&tc->t, id);
	if (tc->t.llc != id) {
		/* Its virtual time is on the clock of the LLC that it comes from. */
		slip_change_domain(&tc->t, domain_of(&tc->t, tc->t.llc), d);
		tc->t.llc = id;
		tc->t.runs_on_llc = 0;
	}
	slip_on_runnable(params(), &tc->t, &s->llc, d, now);
	slice = slip_slice(params(), &tc->t, &s->llc);
	key = slip_queue_key(&tc->t, d, slice);
	/* With SCX_ENQ_REENQ we are called by slip_cpu_release(). */
	if (tc->t.domain >= SLIP_DOMAINS || is_pinned(p, enq_flags & SCX_ENQ_REENQ ? 2 : 1)) {
		scx_bpf_dsq_insert_vtime(p, DSQ_CPU + cpu, slice, key, enq_flags);
		c->bound_put++;
		if (claimed)
			kick_for(claimed - 1, id); /* its mask has just changed */
		/* The kernel wakes an idle CPU itself: the task is on its run queue. */
		if ((enq_flags & SCX_ENQ_WAKEUP) && slip_config.params.preempt &&
		    tc->t.level == 0 && c->cpu.level == SLIP_LEVELS - 1)
			scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
		return;
	}
	scx_bpf_dsq_insert_vtime(p, id, slice, key, enq_flags);
	set_queued(s, (u32)slip_max(0, (s64)scx_bpf_dsq_nr_queued(id)) + 1);
	__sync_fetch_and_add(&s->put, 1);
	if (claimed)
		kick_for(claimed - 1, id);
	else if (!kick_idle(p, tc, id) && placed && tc->path == SLIP_PREEMPT)
		scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
}

/*
 * The key of the first task of a queue that `cpu` may run; false if there is none. After `looks`
 * tasks that it may not run, the key is that of the last one, which is a bound.
 */
static __always_inline bool first_key(u64 dsq, s32 cpu, u32 looks, u64 *key)
{
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	bool found = 0;
	u32 i;

	if (!bpf_iter_scx_dsq_new(&it, dsq, 0)) {
		for (i = 0; i < looks; i++) {
			p = bpf_iter_scx_dsq_next(&it);
			if (!p) {
				found = 0;
				break;
			}
			found = 1;
			*key = p->scx.dsq_vtime;
			if (bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
				break;
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
	return found;
}

static __always_inline bool steal_handover(struct slip_llc_state *s, u32 own_bit, u64 now)
{
	u64 mask = s->llc.handover_mask;
	u32 i, bit, cpu;

	for (i = 0; i < SLIP_STEAL_TRIES; i++) {
		struct slip_cpu *victim;

		bit = slip_next_handover(mask, own_bit);
		if (bit >= 64)
			break;
		mask &= ~slip_bit(bit);
		cpu = cpu_of_bit(s, bit);
		victim = &cpu_of(cpu)->cpu;
		if (!slip_may_steal(params(), victim, now))
			continue;
		if (scx_bpf_dsq_move_to_local(DSQ_HANDOVER + cpu)) {
			slip_handover_taken(&s->llc, victim);
			count(SLIP_C_STOLEN);
			return 1;
		}
	}
	return 0;
}

/*
 * Takes the first task of LLC `far`'s queue that may leave it and may run here. If an idle CPU was
 * woken to do so (`asked`), the task's time on that LLC does not matter. The search has no bound but the queue's
 * length: a crowd of masked tasks at its head may not hide the one that this idle CPU can run.
 */
static __always_inline bool pull(s32 cpu, u32 own, u32 far, bool asked, u64 now)
{
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	bool moved = 0;

	if (!bpf_iter_scx_dsq_new(&it, far, 0)) {
		while ((p = bpf_iter_scx_dsq_next(&it))) {
			struct task_ctx *tc = task_of(p);

			if (!tc || is_pinned(p, 1) || !bpf_cpumask_test_cpu(cpu, p->cpus_ptr))
				continue;
			if (!is_masked(tc) && (!slip_llc_ok(&tc->t, own) ||
					       (!asked && !slip_may_leave(params(), &tc->t, 0, now))))
				continue;
			moved = scx_bpf_dsq_move(&it, p, SCX_DSQ_LOCAL, 0);
			if (moved)
				break;
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
	return moved;
}

/*
 * Takes a task from an LLC whose tasks get less than they are due, although tasks wait here too. Of two random
 * LLCs, the one that is further behind.
 */
__attribute__((noinline)) u32 slip_balance(u32 cpu, u32 id)
{
	struct slip_llc_state *s = llc_of(id), *o;
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	u64 now = scx_bpf_now(), rnd = random_word(now, cpu);
	u32 i, far, moved = 0, best = id;
	s64 lead, most = 0;

	if (id >= slip_config.nr_llcs || slip_config.nr_llcs < 2 ||
	    !slip_balance_due(params(), &s->llc, now, slip_mix(rnd)))
		return 0;
	for (i = 0; i < 2; i++) {
		far = (id + 1 + (u32)(rnd & 0xffffffff) % (slip_config.nr_llcs - 1)) %
		      slip_config.nr_llcs;
		rnd >>= 32;
		o = llc_of(far);
		lead = slip_balance_lead(&s->llc, &s->domains[0], &o->llc, &o->domains[0]);
		if (slip_balance_wants(params(), lead) && lead > most) {
			most = lead;
			best = far;
		}
	}
	if (best == id)
		return 0;
	o = llc_of(best);
	bpf_rcu_read_lock();
	if (!bpf_iter_scx_dsq_new(&it, best, 0)) {
		for (i = 0; i < BALANCE_LOOKS; i++) {
			struct task_ctx *tc;

			p = bpf_iter_scx_dsq_next(&it);
			if (!p)
				break;
			tc = task_of(p);
			if (!tc || is_masked(tc) || is_pinned(p, 1) || tc->t.llc != best ||
			    !slip_llc_ok(&tc->t, id) || !slip_may_leave(params(), &tc->t, 0, now))
				continue;
			moved = scx_bpf_dsq_move(&it, p, SCX_DSQ_LOCAL, 0);
			if (moved) {
				/* It is on this CPU's run queue now, whose lock is held. */
				slip_balance_moved(&tc->t, id, &o->domains[0], &s->domains[0], most);
				break;
			}
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
	bpf_rcu_read_unlock();
	look_queued(o, best);
	if (moved)
		count(SLIP_C_BALANCED);
	return moved;
}

/* Looks for work in other queues when a CPU's own queues have none. */
static __always_inline bool look_elsewhere(s32 cpu, struct slip_cpu_state *c,
					   struct slip_llc_state *s, u32 id)
{
	struct slip_env env = {};
	u32 hint = c->pull_hint;
	u64 now;
	s32 far;

	if (slip_config.nr_llcs <= 1 && !s->llc.handover_mask)
		return 0;
	now = scx_bpf_now();
	if (s->llc.handover_mask && steal_handover(s, c->cpu.bit, now))
		return 1;
	if (slip_config.nr_llcs <= 1)
		return 0;
	if (hint) {
		c->pull_hint = 0;
		if (hint <= slip_config.nr_llcs && pull(cpu, id, hint - 1, 1, now)) {
			look_queued(llc_of(hint - 1), hint - 1);
			count(SLIP_C_FAR_PULL);
			return 1;
		}
	}
	far = slip_pull_from(params(), &env, id, slip_config.nr_llcs, random_word(now, cpu));
	if (far < 0)
		return 0;
	if (!pull(cpu, id, far, 0, now)) {
		look_queued(llc_of(far), far);
		return 0;
	}
	look_queued(llc_of(far), far);
	count(SLIP_C_FAR_PULL);
	return 1;
}

SEC("struct_ops/slip_dispatch")
void BPF_PROG(slip_dispatch, s32 cpu, struct task_struct *prev)
{
	struct slip_cpu_state *c = cpu_of(cpu);
	struct task_ctx *tc = NULL;
	struct slip_heads heads;
	u32 id = c->cpu.llc, from;
	struct slip_llc_state *s = llc_of(id);
	const struct rq *rq;
	u64 slice = 0;

	c->seen_put = *(volatile u32 *)&s->put;
	rq = bpf_this_cpu_ptr(&runqueues);
	if (rq->rt.rt_nr_running) {
		/*
		 * The kernel calls this before it picks the real-time task, which then blocks tasks taken
		 * here (has_real_time()). Tasks bound to this CPU lose nothing by that.
		 */
		if (!prev)
			take_bound(c, cpu);
		return;
	}
	if (c->real_time_since) {
		u32 at = coarse(scx_bpf_now());

		if (at - c->real_time_since >= 2)
			slip_real_time_at = at;
		c->real_time_since = 0;
	}
	if (s->llc.handover_mask & slip_bit(c->cpu.bit)) {
		if (scx_bpf_dsq_move_to_local(DSQ_HANDOVER + cpu)) {
			slip_handover_taken(&s->llc, &c->cpu);
			count(SLIP_C_RAN_NEXT);
			return;
		}
		/* Stolen, or gone with its task; in the latter case only this code clears the bit. */
		if (scx_bpf_dsq_nr_queued(DSQ_HANDOVER + cpu) <= 0)
			slip_handover_taken(&s->llc, &c->cpu);
	}
	if (s->llc.nr_queued && slip_config.nr_llcs > 1 && slip_balance(cpu, id))
		return;
	/* Keys that are not set are not used, but the compiler may then leave pointers in their place. */
	heads.cpu_key = 0;
	heads.llc_key = 0;
	heads.prev_key = 0;
	heads.has_handover = 0;
	heads.has_prev = 0;
	heads.has_llc = 0;
	heads.has_cpu = has_bound(c);
	if (prev && (prev->scx.flags & SCX_TASK_QUEUED))
		tc = task_of(prev);
	if (!tc && !heads.has_cpu) {
		/* The common case, a task that blocked: no keys to compare. */
		if (take_llc(s, id))
			return;
	} else {
		if (tc) {
			classify(prev, tc, scx_bpf_now());
			account(prev, tc, &c->cpu, 0);
			tc->accounted = 1;
			slice = slip_slice(params(), &tc->t, &s->llc);
			heads.prev_key = slip_queue_key(&tc->t, domain_of(&tc->t, id), slice);
			heads.has_prev = bpf_cpumask_test_cpu(cpu, prev->cpus_ptr) &&
					 (is_masked(tc) || slip_llc_ok(&tc->t, id));
		}
		if (heads.has_cpu)
			heads.has_cpu = first_key(DSQ_CPU + cpu, cpu, 1, &heads.cpu_key);
		heads.has_llc = first_key(id, cpu, PEEKS, &heads.llc_key);
		from = slip_choose(&heads);
		if (from == SLIP_FROM_PREV) {
			slip_on_turn(&tc->t);
			prev->scx.slice = slice;
			tc->accounted = 0;
			count(SLIP_C_KEPT);
			return;
		}
		/* Another CPU may have taken the task since: then the other queue. */
		if (from == SLIP_FROM_CPU) {
			if (take_bound(c, cpu) || take_llc(s, id))
				return;
		} else {
			if (take_llc(s, id) || take_bound(c, cpu))
				return;
		}
	}
	if (look_elsewhere(cpu, c, s, id))
		return;
	if (!prev) {
		/* Idle, and kicked in vain: the kernel does not call update_idle() again. */
		slip_cpu_set_idle(params(), &s->llc, &c->cpu, 1);
		return;
	}
	if (tc) {
		/* No other task wants the CPU: continue, with our slice instead of the kernel's 20 ms. */
		slip_on_kept(params(), &tc->t, domain_of(&tc->t, id));
		prev->scx.slice = slice;
		tc->accounted = 0;
		count(SLIP_C_KEPT);
	}
}

/* Is a CPU idle, in any LLC? */
static __always_inline bool any_idle(void)
{
	u32 i;

	bpf_for(i, 0, SLIP_LLCS_MAX) {
		if (i >= slip_config.nr_llcs)
			break;
		if (llc_of(i)->llc.idle_mask)
			return 1;
	}
	return 0;
}

/*
 * Wakes idle CPUs for tasks of LLC `id`'s queue. Returns their number. Examines all of the queue, because tasks
 * whose masks have no idle CPU may be ahead of one whose mask has; ticks of several CPUs share one search per
 * RESCUE_NS. This and slip_send_aged() are global functions, which the verifier checks once and not in each of
 * their callers.
 */
__attribute__((noinline)) u32 slip_rescue(u32 id)
{
	struct slip_llc_state *s = llc_of(id);
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	u64 now = scx_bpf_now();
	u32 woken = 0;

	/* Two CPUs that read the same time both search, which is harmless. */
	if (now - s->rescued_at < RESCUE_NS || !any_idle())
		return 0;
	s->rescued_at = now;
	bpf_rcu_read_lock(); /* the timer belongs to a program that may sleep */
	if (!bpf_iter_scx_dsq_new(&it, id, 0)) {
		while ((p = bpf_iter_scx_dsq_next(&it))) {
			struct task_ctx *tc = task_of(p);

			if (!tc || !kick_idle(p, tc, id))
				continue;
			woken++;
			if (!any_idle())
				break;
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
	bpf_rcu_read_unlock();
	return woken;
}

SEC("struct_ops/slip_tick")
void BPF_PROG(slip_tick, struct task_struct *p)
{
	struct task_ctx *tc = task_of(p);
	u32 cpu = bpf_get_smp_processor_id();
	struct slip_cpu *c = &cpu_of(cpu)->cpu;
	struct slip_env env = { .p = NULL };
	const struct rq *rq = bpf_this_cpu_ptr(&runqueues);
	u32 id = c->llc;
	struct slip_llc_state *s = llc_of(id);
	u64 now = scx_bpf_now();
	s32 target, idle;

	if (tc) {
		c->level = tc->t.level;
		if (rq->nr_running > 1 && slip_tick_wants_room(params(), &tc->t, c, now)) {
			p->scx.slice = 0;
			count(SLIP_C_MADE_ROOM);
		}
	}
	if (slip_tick_wants_kick(params(), &s->llc, c, now)) {
		idle = slip_env_claim_thread(&env, id);
		if (idle >= 0) {
			scx_bpf_kick_cpu(idle, 0);
			count(SLIP_C_TICK_KICK);
		}
		return;
	}
	if (id >= slip_config.nr_llcs || !look_queued(s, id))
		return;
	if (slip_rescue(id)) {
		count(SLIP_C_TICK_KICK);
		return;
	}
	target = slip_tick_far(params(), &env, id, slip_config.nr_llcs, random_word(now, cpu));
	if (target < 0)
		return;
	idle = slip_env_claim_thread(&env, target);
	if (idle >= 0) {
		kick_for(idle, id);
		count(SLIP_C_TICK_KICK);
	}
}

/* The CPU for a task that has waited too long: its last one, or another without real-time tasks. */
static __always_inline s32 aged_cpu(struct task_struct *p, const struct task_ctx *tc)
{
	s32 cpu = scx_bpf_task_cpu(p);
	struct slip_llc_state *s = llc_of(cpu_of(cpu)->cpu.llc);
	u32 i;

	if (tc->t.domain >= SLIP_DOMAINS || is_pinned(p, 1) || !has_real_time(cpu))
		return cpu;
	bpf_for(i, 0, SLIP_LLC_CPUS) {
		u32 other = s->cpu_of_bit[i & 63];

		if (i < s->llc.nr_cpus && bpf_cpumask_test_cpu(other, p->cpus_ptr) &&
		    !has_real_time(other))
			return other;
	}
	return cpu;
}

/*
 * Sends a task that has waited for AGED_NS to the CPU it last ran on, ahead of the order. Examines the
 * last tasks of the queue, which have the least credit; sends one at a time. The order by virtual time
 * does not bound a wait: a task of nice 19 among many hogs waits as long as under EEVDF.
 */
__attribute__((noinline)) u32 slip_send_aged(u64 dsq, u64 now)
{
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	u32 i, sent = 0;

	bpf_rcu_read_lock(); /* the timer belongs to a program that may sleep */
	if (!bpf_iter_scx_dsq_new(&it, dsq, SCX_DSQ_ITER_REV)) {
		for (i = 0; i < AGED_LOOKS; i++) {
			struct task_ctx *tc;

			p = bpf_iter_scx_dsq_next(&it);
			if (!p)
				break;
			tc = task_of(p);
			if (!tc || now < tc->t.queued_at || now - tc->t.queued_at < AGED_NS)
				continue;
			if (scx_bpf_dsq_move(&it, p, SCX_DSQ_LOCAL_ON | aged_cpu(p, tc), 0)) {
				count(SLIP_C_AGED);
				sent = 1;
				break;
			}
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
	bpf_rcu_read_unlock();
	return sent;
}

static int on_timer(void *map, int *key, struct bpf_timer *timer)
{
	u64 now = scx_bpf_now();
	u32 i;

	bpf_for(i, 0, SLIP_LLCS_MAX) {
		if (i >= slip_config.nr_llcs)
			break;
		if (!look_queued(llc_of(i), i))
			continue;
		if (slip_rescue(i))
			count(SLIP_C_RESCUED);
		slip_send_aged(i, now);
	}
	bpf_for(i, 0, SLIP_CPUS_MAX) {
		if (cpu_of(i)->cpu.llc < slip_config.nr_llcs && has_bound(cpu_of(i)))
			slip_send_aged(DSQ_CPU + i, now);
	}
	bpf_timer_start(timer, TIMER_NS, 0);
	return 0;
}

SEC("struct_ops/slip_update_idle")
void BPF_PROG(slip_update_idle, s32 cpu, bool idle)
{
	struct slip_cpu_state *c = cpu_of(cpu);
	struct slip_llc_state *s = llc_of(c->cpu.llc);

	slip_cpu_set_idle(params(), &s->llc, &c->cpu, idle);
	if (!idle && has_real_time(cpu)) {
		c->real_time_since = coarse(scx_bpf_now());
		/* The task that it was woken for must run elsewhere. */
		if (c->cpu.llc < slip_config.nr_llcs && look_queued(s, c->cpu.llc))
			slip_rescue(c->cpu.llc);
		return;
	}
	/*
	 * A CPU that queues a task increments `put` and then looks for idle CPUs. This CPU is marked idle
	 * and then reads `put`. One of the two sees the other. The task itself may not be queued yet, so
	 * the count is compared, with its value before our own look.
	 */
	if (idle && (*(volatile u32 *)&s->put != c->seen_put || has_bound(c)))
		scx_bpf_kick_cpu(cpu, 0);
}

/*
 * A real-time task takes the CPU. Tasks in its local queue go back to ops.enqueue, and any other CPU
 * may steal its handoff at once.
 */
SEC("struct_ops/slip_cpu_release")
void BPF_PROG(slip_cpu_release, s32 cpu, struct scx_cpu_release_args *args)
{
	struct slip_cpu *c = &cpu_of(cpu)->cpu;
	struct slip_llc_state *s = llc_of(c->llc);
	struct slip_env env = {};
	u32 zero = SLIP_C_REENQUEUED, back;
	u64 *n;
	s32 idle;

	c->level = 0;
	cpu_of(cpu)->real_time_since = coarse(scx_bpf_now());
	if (bpf_ksym_exists(scx_bpf_reenqueue_local___count)) {
		back = scx_bpf_reenqueue_local___count();
		n = bpf_map_lookup_elem(&slip_stats, &zero);
		if (n && back)
			*n += back;
	} else if (bpf_ksym_exists(scx_bpf_reenqueue_local___void)) {
		scx_bpf_reenqueue_local___void();
	}
	if (s->llc.handover_mask & slip_bit(c->bit)) {
		c->handover_at = 0;
		idle = slip_env_claim_thread(&env, c->llc);
		if (idle >= 0)
			scx_bpf_kick_cpu(idle, 0);
	}
}

SEC("struct_ops/slip_set_cpumask")
void BPF_PROG(slip_set_cpumask, struct task_struct *p, const struct cpumask *mask)
{
	struct task_ctx *tc = task_of(p);
	struct slip_domain *from;
	u32 domain;

	if (!tc)
		return;
	domain = join_domain(p);
	leave_mask(tc->t.domain);
	if (tc->t.domain == domain)
		return;
	from = domain_of(&tc->t, tc->t.llc);
	tc->t.domain = domain;
	slip_change_domain(&tc->t, from, domain_of(&tc->t, tc->t.llc));
}

/* A task comes from another scheduling class: CPU time used there is not charged. */
SEC("struct_ops/slip_enable")
void BPF_PROG(slip_enable, struct task_struct *p)
{
	struct task_ctx *tc = task_of(p);

	if (tc)
		tc->t.exec_ns = p->se.sum_exec_runtime;
}

SEC("struct_ops/slip_init_task")
s32 BPF_PROG(slip_init_task, struct task_struct *p, struct scx_init_task_args *args)
{
	struct task_ctx *tc =
		bpf_task_storage_get(&slip_tasks, p, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	u32 id = cpu_of(scx_bpf_task_cpu(p))->cpu.llc;

	if (!tc)
		return -12; /* ENOMEM */
	tc->t.domain = join_domain(p);
	slip_task_init(&tc->t, p->scx.weight, id, domain_of(&tc->t, id)->clock);
	tc->t.exec_ns = p->se.sum_exec_runtime;
	return 0;
}

SEC("struct_ops/slip_exit_task")
void BPF_PROG(slip_exit_task, struct task_struct *p, struct scx_exit_task_args *args)
{
	struct task_ctx *tc = task_of(p);

	if (tc)
		leave_mask(tc->t.domain);
}

SEC("struct_ops.s/slip_init")
s32 BPF_PROG(slip_init)
{
	struct timer_slot *slot;
	u32 i, zero = 0;
	s32 err;

	bpf_for(i, 0, SLIP_LLCS_MAX) {
		if (i >= slip_config.nr_llcs)
			break;
		err = scx_bpf_create_dsq(i, -1);
		if (err)
			return err;
	}
	bpf_for(i, 0, SLIP_CPUS_MAX) {
		if (cpu_of(i)->cpu.llc == ~0u)
			continue;
		err = scx_bpf_create_dsq(DSQ_CPU + i, -1);
		if (!err)
			err = scx_bpf_create_dsq(DSQ_HANDOVER + i, -1);
		if (err)
			return err;
	}
	slot = bpf_map_lookup_elem(&slip_timer, &zero);
	if (!slot)
		return -12; /* ENOMEM */
	err = bpf_timer_init(&slot->timer, &slip_timer, CLOCK_MONOTONIC);
	if (!err)
		err = bpf_timer_set_callback(&slot->timer, on_timer);
	if (!err)
		err = bpf_timer_start(&slot->timer, TIMER_NS, 0);
	return err;
}

/* ---- state printed by the kernel when it ends the scheduler -------------------------------- */

#define dump(fmt, args...)                                                              \
	do {                                                                            \
		static char text[] = fmt;                                               \
		unsigned long long values[___bpf_narg(args)];                           \
                                                                                        \
		___bpf_fill(values, args);                                              \
		scx_bpf_dump_bstr(text, values, sizeof(values));                        \
	} while (0)

SEC("struct_ops/slip_dump")
void BPF_PROG(slip_dump, struct scx_dump_ctx *to)
{
	u32 i;

	bpf_for(i, 0, SLIP_LLCS_MAX) {
		struct slip_llc_state *s = llc_of(i);

		if (i >= slip_config.nr_llcs)
			break;
		dump("LLC %u: cpus %u idle %llx handovers %llx queued %d (cached %u) put %u", i,
		     s->llc.nr_cpus, s->llc.idle_mask, s->llc.handover_mask,
		     scx_bpf_dsq_nr_queued(i), s->llc.nr_queued, s->put);
		dump("LLC %u: clock %llu saturated %u overloaded %u", i, s->llc.vclock,
		     s->llc.saturated, s->llc.overloaded);
	}
}

SEC("struct_ops/slip_dump_cpu")
void BPF_PROG(slip_dump_cpu, struct scx_dump_ctx *to, s32 cpu, bool idle)
{
	struct slip_cpu_state *c = cpu_of(cpu);

	if (c->cpu.llc >= slip_config.nr_llcs)
		return;
	dump("LLC %u bit %u level %u own queue %d (put %u, empty at %u) hand-overs %d seen put %u",
	     c->cpu.llc, c->cpu.bit, c->cpu.level, scx_bpf_dsq_nr_queued(DSQ_CPU + cpu),
	     c->bound_put, c->bound_empty_at, scx_bpf_dsq_nr_queued(DSQ_HANDOVER + cpu),
	     c->seen_put);
}

SEC("struct_ops/slip_dump_task")
void BPF_PROG(slip_dump_task, struct scx_dump_ctx *to, struct task_struct *p)
{
	struct task_ctx *tc = task_of(p);

	if (!tc)
		return;
	dump("LLC %u domain %u weight %u level %u vtime %llu queued at %llu path %u handed %u",
	     tc->t.llc, tc->t.domain, tc->t.weight, tc->t.level, tc->t.vtime, tc->t.queued_at,
	     tc->path, tc->t.handed);
}

SEC("struct_ops/slip_exit_op")
void BPF_PROG(slip_exit_op, struct scx_exit_info *ei)
{
	u32 zero = 0;
	struct slip_exit *out = bpf_map_lookup_elem(&slip_exit, &zero);

	if (!out)
		return;
	bpf_probe_read_kernel_str(out->reason, sizeof(out->reason), ei->reason);
	bpf_probe_read_kernel_str(out->message, sizeof(out->message), ei->msg);
	bpf_probe_read_kernel_str(out->dump, sizeof(out->dump), ei->dump);
	out->code = ei->exit_code;
	out->kind = ei->kind;
	bpf_ringbuf_output(&slip_exited, &out->kind, sizeof(out->kind), BPF_RB_FORCE_WAKEUP);
}

SEC(".struct_ops.link")
struct sched_ext_ops slipstream = {
	.select_cpu = (void *)slip_select_cpu,
	.enqueue = (void *)slip_enqueue,
	.dispatch = (void *)slip_dispatch,
	.tick = (void *)slip_tick,
	.update_idle = (void *)slip_update_idle,
	.set_cpumask = (void *)slip_set_cpumask,
	.cpu_release = (void *)slip_cpu_release,
	.enable = (void *)slip_enable,
	.init_task = (void *)slip_init_task,
	.exit_task = (void *)slip_exit_task,
	.dump = (void *)slip_dump,
	.dump_cpu = (void *)slip_dump_cpu,
	.dump_task = (void *)slip_dump_task,
	.init = (void *)slip_init,
	.exit = (void *)slip_exit_op,
	/*
	 * The second, which the loader takes out for kernels that do not know it: without it a kernel that does
	 * sends tasks that may not migrate back to the CPU that they are on, ahead of all others and with a slice
	 * of 20 ms. That includes the task that a real-time one preempts, because ops.cpu_release runs on its
	 * behalf. It would keep the CPU for good if the real-time task comes back within those 20 ms.
	 */
	.flags = SCX_OPS_KEEP_BUILTIN_IDLE | SCX_OPS_ENQ_MIGRATION_DISABLED,
	/*
	 * The kernel's maximum. A task bound to one CPU waits as long as a real-time task keeps that CPU;
	 * Linux 6.18 reserves no share for our class.
	 */
	.timeout_ms = 30000,
	.name = "slipstream",
};
