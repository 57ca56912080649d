/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * scx_slipstream: the placement policy of slip_policy.h on a running kernel.
 *
 * Queues (DSQs): one per LLC, ordered by virtual deadline, for tasks that may run anywhere; one per
 * CPU, ordered alike, for tasks with a CPU mask of their own; one per CPU for the task that was
 * handed over to it. The last is not SCX_DSQ_LOCAL, from which nobody could take it.
 *
 * What decides is in the header; here are the maps, the kernel's queues and who is told what.
 */
#include "kernel.h"
#include "slip_policy.h"
#include "intf.h"

char _license[] SEC("license") = "GPL";

#define DSQ_CPU		0x10000ull	/* + cpu: tasks bound to it */
#define DSQ_HANDOVER	0x20000ull	/* + cpu: the task handed to it */
#define PULL_LOOKS	8	/* tasks of another LLC's queue that a pull looks at */
#define RECLASSIFY_RUNS	1024u	/* runs after which a task's cgroup is looked up again */

struct task_ctx {
	struct slip_task t;
	u64 comm[2];		/* the name that its class was found by */
	u32 class_runs;		/* runs since then */
	u32 class_weight;	/* 0: by nice value */
	u32 path;		/* placement, from select_cpu to enqueue */
	u32 llc;
	u32 selected;		/* select_cpu saw this wake-up */
	u32 pad;
};

/*
 * Globals rather than maps to look up: a wake-up costs a few thousand instructions in all, and each
 * look-up some tens. The configuration is read-only once loaded, so the verifier drops what it
 * switches off.
 */
const volatile struct slip_config slip_config SEC(".rodata.config");
struct slip_cpu_state slip_cpus[SLIP_CPUS_MAX] SEC(".data.cpus");
struct slip_llc_state slip_llcs[SLIP_LLCS_MAX] SEC(".data.llcs");

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

/* Class of a cgroup; kept up to date by the loader. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
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

struct slip_env {
	struct task_struct *p;
};

/* Not just a cast: without `volatile` the compiler would take the zeros of the source for granted. */
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
 * Whether a queue may hold somebody, without asking the kernel, which would look it up by its id.
 * Who puts a task there counts `put` up afterwards; who finds the queue empty writes down the count
 * that it had read before. A late writer leaves a difference, so that somebody looks in vain.
 */
static __always_inline bool may_hold(struct slip_queue *q)
{
	return q->put != q->empty_at;
}

static __always_inline bool take(struct slip_queue *q, u64 dsq)
{
	u32 put = *(volatile u32 *)&q->put;

	if (put == q->empty_at)
		return 0;
	if (scx_bpf_dsq_move_to_local(dsq))
		return 1;
	q->empty_at = put;
	return 0;
}

/*
 * The CPU of a bit below 64. The compiler knows that slip_lowest_bit() of something is below 64 and
 * leaves a plain mask out; the verifier does not know, so the compiler must not either.
 */
static __always_inline u32 cpu_of_bit(struct slip_llc_state *llc, u32 bit)
{
	barrier_var(bit);
	return llc->cpu_of_bit[bit & 63];
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

/* Good enough to pick LLCs by, and cheaper than the kernel's generator. */
static __always_inline u64 random_word(u64 now, u32 cpu)
{
	return slip_mix(now ^ (u64)cpu << 48);
}

/* ---- what the policy asks for ------------------------------------------------------------- */

static __always_inline struct slip_llc *slip_env_llc(struct slip_env *env, u32 id)
{
	struct slip_llc_state *s;
	u32 queued;

	(void)env;
	if (id >= slip_config.nr_llcs)
		return NULL;
	s = llc_of(id);
	/* The queue's length is the kernel's to know. */
	queued = may_hold(&s->queue) ? (u32)slip_max(0, (s64)scx_bpf_dsq_nr_queued(id)) : 0;
	if (queued != s->llc.nr_queued) {
		s->llc.nr_queued = queued;
		slip_llc_update(params(), &s->llc);
	}
	return &s->llc;
}

static __always_inline bool slip_env_claim_cpu(struct slip_env *env, u32 cpu)
{
	struct slip_cpu *c = &cpu_of(cpu)->cpu;

	(void)env;
	if (!scx_bpf_test_and_clear_cpu_idle(cpu))
		return 0;
	__sync_fetch_and_and(&llc_of(c->llc)->llc.idle_mask, ~slip_bit(c->bit));
	return 1;
}

/* Claims a CPU of `mask`. Our bit may be late; the kernel's own decides, and ours follows. */
static __always_inline s32 claim_of(struct slip_llc_state *s, u64 mask)
{
	u32 cpu, bit, i;

	for (i = 0; i < 2; i++) {
		bit = slip_lowest_bit(mask);
		if (bit >= 64)
			return -1;
		cpu = cpu_of_bit(s, bit);
		__sync_fetch_and_and(&s->llc.idle_mask, ~slip_bit(bit));
		if (scx_bpf_test_and_clear_cpu_idle(cpu))
			return (s32)cpu;
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

static s32 slip_env_claim_masked(struct slip_env *env)
{
	return env->p ? scx_bpf_pick_idle_cpu(env->p->cpus_ptr, 0) : -1;
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

/* Finds a task's class anew when its name changed, and now and then, as it may change cgroups. */
static __always_inline void classify(struct task_struct *p, struct task_ctx *tc)
{
	u64 comm[2];
	u32 id;
	struct slip_class *class;

	if (!slip_config.nr_rules && !slip_config.cgroup_rules)
		return;
	__builtin_memset(comm, 0, sizeof(comm));
	bpf_probe_read_kernel_str(comm, sizeof(comm), p->comm);
	if (comm[0] == tc->comm[0] && comm[1] == tc->comm[1] && tc->class_runs++ < RECLASSIFY_RUNS)
		return;
	tc->comm[0] = comm[0];
	tc->comm[1] = comm[1];
	tc->class_runs = 0;
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

/*
 * A task that disabled its own migration may be taken by its CPU alone, whatever its mask says. The
 * running task's count includes that of this program.
 */
static __always_inline bool is_masked(struct task_struct *p)
{
	u32 own = p == bpf_get_current_task_btf();

	return (u32)p->nr_cpus_allowed < slip_config.nr_cpus || p->migration_disabled > own;
}

/* Tells the policy what `p` did since it last woke or was queued. */
static __always_inline void account(struct task_struct *p, struct task_ctx *tc,
				    struct slip_cpu *last, bool blocked)
{
	tc->t.weight = tc->class_weight ? tc->class_weight : p->scx.weight;
	if (slip_account(params(), &tc->t, last->llc, &llc_of(last->llc)->llc,
			 p->se.sum_exec_runtime, blocked))
		count(SLIP_C_HINT_LIED);
}

/* CPU time that the running task has used by `now`; the kernel's count is as old as its last tick. */
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
	classify(p, tc);
	account(p, tc, prev, 1);
	tc->t.queued_at = w.now;
	w.rnd = random_word(w.now, w.waker_cpu);
	w.waker_llc = here->llc;
	w.prev_llc = prev->llc;
	w.nr_llcs = slip_config.nr_llcs;
	w.waker_queued = 0;
	w.flags = 0;
	if (is_masked(p)) {
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

		/* The idle task's hint comes from an interrupt: it will not block, it is idle. */
		if (current->pid)
			waker = task_of(current);
		if (waker) {
			const struct rq *rq = bpf_this_cpu_ptr(&runqueues);

			w.flags |= SLIP_WAKE_SYNC;
			if (current->flags & PF_EXITING)
				w.flags |= SLIP_WAKE_EXITING;
			slip_on_sync_wake(&waker->t, exec_now(current, rq, w.now));
			/* Its own, and what else last ran here and now waits in some queue. */
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
		return (w.flags & SLIP_WAKE_PREV_OK) || to.path != SLIP_QUEUE_CPU ? prev_cpu : (s32)to.cpu;
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

static __always_inline void kick_idle(struct slip_env *env, u32 llc)
{
	s32 cpu = slip_env_claim_thread(env, llc);

	if (cpu >= 0)
		scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
}

SEC("struct_ops/slip_enqueue")
void BPF_PROG(slip_enqueue, struct task_struct *p, u64 enq_flags)
{
	struct task_ctx *tc = task_of(p);
	struct slip_env env = { .p = p };
	u32 cpu = scx_bpf_task_cpu(p), id;
	struct slip_cpu_state *c = cpu_of(cpu);
	struct slip_llc_state *s;
	struct slip_llc *llc;
	u64 slice, key;
	bool placed;

	if (!tc) {
		/* Not ours to decide: the built-in queue loses nobody. */
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, 1000000, enq_flags);
		return;
	}
	id = c->cpu.llc;
	/* select_cpu is not asked for tasks of one CPU. */
	placed = tc->selected && (enq_flags & SCX_ENQ_WAKEUP);
	tc->selected = 0;
	if (!placed)
		account(p, tc, &c->cpu, enq_flags & SCX_ENQ_WAKEUP);
	else if (!is_masked(p))
		id = tc->llc;
	s = llc_of(id);
	llc = slip_env_llc(&env, id);
	if (!llc) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, 1000000, enq_flags);
		return;
	}
	slip_on_runnable(params(), &tc->t, llc, scx_bpf_now());
	slice = slip_slice(params(), &tc->t, llc);
	key = slip_queue_key(&tc->t, slice);
	if (is_masked(p)) {
		scx_bpf_dsq_insert_vtime(p, DSQ_CPU + cpu, slice, key, enq_flags);
		__sync_fetch_and_add(&c->bound.put, 1);
		if (slip_env_claim_cpu(&env, cpu))
			scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
		return;
	}
	scx_bpf_dsq_insert_vtime(p, id, slice, key, enq_flags);
	__sync_fetch_and_add(&s->queue.put, 1);
	/* A CPU may have gone idle since the search; it would sleep beside a waiting task. */
	if (llc->idle_mask)
		kick_idle(&env, id);
	else if (placed && tc->path == SLIP_PREEMPT)
		scx_bpf_kick_cpu(cpu, SCX_KICK_PREEMPT);
}

/* The key of the first task of a queue. */
static __always_inline u64 first_key(u64 dsq)
{
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	u64 key = 0;

	if (!bpf_iter_scx_dsq_new(&it, dsq, 0)) {
		p = bpf_iter_scx_dsq_next(&it);
		if (p)
			key = p->scx.dsq_vtime;
	}
	bpf_iter_scx_dsq_destroy(&it);
	return key;
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

/* Takes the first task of LLC `far`'s queue that may leave it. */
static __always_inline bool pull(u32 own, u32 far, u64 now)
{
	struct bpf_iter_scx_dsq it;
	struct task_struct *p;
	bool moved = 0;
	u32 i;

	if (!bpf_iter_scx_dsq_new(&it, far, 0)) {
		for (i = 0; i < PULL_LOOKS; i++) {
			struct task_ctx *tc;

			p = bpf_iter_scx_dsq_next(&it);
			if (!p)
				break;
			tc = task_of(p);
			if (!tc || !slip_llc_ok(&tc->t, own) ||
			    !slip_may_leave(params(), &tc->t, 0, now))
				continue;
			moved = scx_bpf_dsq_move(&it, p, SCX_DSQ_LOCAL, 0);
			if (moved)
				break;
		}
	}
	bpf_iter_scx_dsq_destroy(&it);
	return moved;
}

SEC("struct_ops/slip_dispatch")
void BPF_PROG(slip_dispatch, s32 cpu, struct task_struct *prev)
{
	struct slip_cpu_state *c = cpu_of(cpu);
	struct slip_env env = {};
	struct slip_heads heads;
	u32 id = c->cpu.llc, from;
	struct slip_llc_state *s = llc_of(id);
	u64 now;
	s32 far;

	if (s->llc.handover_mask & slip_bit(c->cpu.bit)) {
		slip_handover_taken(&s->llc, &c->cpu);
		if (scx_bpf_dsq_move_to_local(DSQ_HANDOVER + cpu)) {
			count(SLIP_C_RAN_NEXT);
			return;
		}
	}
	heads.has_handover = 0;
	heads.has_cpu = may_hold(&c->bound);
	heads.has_llc = may_hold(&s->queue);
	if (heads.has_cpu || heads.has_llc) {
		if (heads.has_cpu && heads.has_llc) {
			heads.cpu_key = first_key(DSQ_CPU + cpu);
			heads.llc_key = first_key(id);
		}
		from = slip_choose(&heads);
		/* What was chosen may have been taken meanwhile: then the other queue. */
		if (from == SLIP_FROM_CPU) {
			if (take(&c->bound, DSQ_CPU + cpu) || take(&s->queue, id))
				return;
		} else {
			if (take(&s->queue, id) || take(&c->bound, DSQ_CPU + cpu))
				return;
		}
	}
	if (slip_config.nr_llcs > 1 || s->llc.handover_mask) {
		now = scx_bpf_now();
		if (s->llc.handover_mask && steal_handover(s, c->cpu.bit, now))
			return;
		if (slip_config.nr_llcs > 1) {
			far = slip_pull_from(&env, id, slip_config.nr_llcs, random_word(now, cpu));
			if (far >= 0 && pull(id, far, now)) {
				count(SLIP_C_FAR_PULL);
				return;
			}
		}
	}
	if (!prev) {
		/* Idle, and kicked for nothing: the kernel does not call update_idle() again. */
		slip_cpu_set_idle(params(), &s->llc, &c->cpu, 1);
		return;
	}
	if (prev->scx.flags & SCX_TASK_QUEUED) {
		/* Nobody else wants the CPU: go on, with a slice of ours, not the kernel's 20 ms. */
		struct task_ctx *tc = task_of(prev);

		if (tc && !prev->scx.slice) {
			account(prev, tc, &c->cpu, 0);
			prev->scx.slice = slip_slice(params(), &tc->t, &s->llc);
			count(SLIP_C_KEPT);
		}
	}
}

SEC("struct_ops/slip_tick")
void BPF_PROG(slip_tick, struct task_struct *p)
{
	struct task_ctx *tc = task_of(p);
	u32 cpu = bpf_get_smp_processor_id();
	struct slip_cpu *c = &cpu_of(cpu)->cpu;
	struct slip_env env = { .p = NULL };
	const struct rq *rq = bpf_this_cpu_ptr(&runqueues);
	struct slip_llc_state *s = llc_of(c->llc);
	u64 now = scx_bpf_now();
	s32 target, idle;

	if (tc) {
		c->level = tc->t.level;
		if (rq->nr_running > 1 && slip_tick_wants_room(params(), &tc->t, c, now)) {
			p->scx.slice = 0;
			count(SLIP_C_MADE_ROOM);
		}
	}
	/* Should a queue ever hold a task unknown to its count, it waits a tick at most. */
	if (!may_hold(&s->queue) && scx_bpf_dsq_nr_queued(c->llc) > 0)
		__sync_fetch_and_add(&s->queue.put, 1);
	if (slip_tick_wants_kick(params(), &s->llc, c, now))
		target = c->llc;
	else
		target = slip_tick_far(params(), &env, c->llc, slip_config.nr_llcs,
				       random_word(now, cpu));
	if (target < 0)
		return;
	idle = slip_env_claim_thread(&env, target);
	if (idle >= 0) {
		scx_bpf_kick_cpu(idle, SCX_KICK_IDLE);
		count(SLIP_C_TICK_KICK);
	}
}

SEC("struct_ops/slip_update_idle")
void BPF_PROG(slip_update_idle, s32 cpu, bool idle)
{
	struct slip_cpu_state *c = cpu_of(cpu);
	struct slip_llc_state *s = llc_of(c->cpu.llc);

	slip_cpu_set_idle(params(), &s->llc, &c->cpu, idle);
	/*
	 * Who queues a task looks for idle CPUs afterwards, and we look at the queues after saying
	 * that we idle: one of the two sees the other.
	 */
	if (idle && (may_hold(&s->queue) || may_hold(&c->bound)))
		scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
}

SEC("struct_ops/slip_init_task")
s32 BPF_PROG(slip_init_task, struct task_struct *p, struct scx_init_task_args *args)
{
	struct task_ctx *tc =
		bpf_task_storage_get(&slip_tasks, p, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	u32 id = cpu_of(scx_bpf_task_cpu(p))->cpu.llc;

	if (!tc)
		return -12; /* ENOMEM */
	slip_task_init(&tc->t, p->scx.weight, id, llc_of(id)->llc.vclock);
	tc->t.exec_ns = p->se.sum_exec_runtime;
	return 0;
}

SEC("struct_ops.s/slip_init")
s32 BPF_PROG(slip_init)
{
	s32 err;
	u32 i;

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
	return 0;
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
	out->code = ei->exit_code;
	out->kind = ei->kind;
}

SEC(".struct_ops.link")
struct sched_ext_ops slipstream = {
	.select_cpu = (void *)slip_select_cpu,
	.enqueue = (void *)slip_enqueue,
	.dispatch = (void *)slip_dispatch,
	.tick = (void *)slip_tick,
	.update_idle = (void *)slip_update_idle,
	.init_task = (void *)slip_init_task,
	.init = (void *)slip_init,
	.exit = (void *)slip_exit_op,
	.flags = SCX_OPS_KEEP_BUILTIN_IDLE,
	.timeout_ms = 5000,
	.name = "slipstream",
};
