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
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct slip_config);
} slip_config SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SLIP_CPUS_MAX);
	__type(key, u32);
	__type(value, struct slip_cpu);
} slip_cpus SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SLIP_LLCS_MAX);
	__type(key, u32);
	__type(value, struct slip_llc);
} slip_llcs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SLIP_LLCS_MAX);
	__type(key, u32);
	__type(value, struct slip_llc_info);
} slip_llc_infos SEC(".maps");

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
	u32 nr_llcs;
};

static __always_inline struct slip_config *config(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&slip_config, &zero);
}

static __always_inline struct slip_cpu *cpu_of(u32 cpu)
{
	return bpf_map_lookup_elem(&slip_cpus, &cpu);
}

/*
 * The CPU of a bit below 64. The compiler knows that slip_lowest_bit() of something is below 64 and
 * leaves a plain mask out; the verifier does not know, so the compiler must not either.
 */
static __always_inline u32 cpu_of_bit(struct slip_llc_info *info, u32 bit)
{
	barrier_var(bit);
	return info->cpu_of_bit[bit & 63];
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

static __always_inline u64 random_word(void)
{
	return (u64)bpf_get_prandom_u32() << 32 | bpf_get_prandom_u32();
}

/* ---- what the policy asks for ------------------------------------------------------------- */

static struct slip_llc *slip_env_llc(struct slip_env *env, u32 id)
{
	struct slip_config *cfg = config();
	struct slip_llc *llc;

	if (id >= env->nr_llcs || !cfg)
		return NULL;
	llc = bpf_map_lookup_elem(&slip_llcs, &id);
	if (llc) {
		/* The queue's length is the kernel's to know. */
		llc->nr_queued = (u32)slip_max(0, (s64)scx_bpf_dsq_nr_queued(id));
		slip_llc_update(&cfg->params, llc);
	}
	return llc;
}

static bool slip_env_claim_cpu(struct slip_env *env, u32 cpu)
{
	struct slip_cpu *c;
	struct slip_llc *llc;

	(void)env;
	if (!scx_bpf_test_and_clear_cpu_idle(cpu))
		return 0;
	c = cpu_of(cpu);
	llc = c ? bpf_map_lookup_elem(&slip_llcs, &c->llc) : NULL;
	if (llc)
		__sync_fetch_and_and(&llc->idle_mask, ~slip_bit(c->bit));
	return 1;
}

/* Claims a CPU of `mask`. Our bit may be late; the kernel's own decides, and ours follows. */
static __always_inline s32 claim_of(u32 id, struct slip_llc *llc, struct slip_llc_info *info,
				    u64 mask)
{
	u32 cpu, bit, i;

	for (i = 0; i < 2; i++) {
		bit = slip_lowest_bit(mask);
		if (bit >= 64)
			return -1;
		cpu = cpu_of_bit(info, bit);
		__sync_fetch_and_and(&llc->idle_mask, ~slip_bit(bit));
		if (scx_bpf_test_and_clear_cpu_idle(cpu))
			return (s32)cpu;
		mask &= ~slip_bit(bit);
	}
	return -1;
}

static s32 slip_env_claim_core(struct slip_env *env, u32 id)
{
	struct slip_llc *llc = bpf_map_lookup_elem(&slip_llcs, &id);
	struct slip_llc_info *info = bpf_map_lookup_elem(&slip_llc_infos, &id);
	u64 idle;

	(void)env;
	if (!llc || !info)
		return -1;
	idle = llc->idle_mask;
	return claim_of(id, llc, info, (idle & idle >> 1 & info->pair_first) | (idle & info->single));
}

static s32 slip_env_claim_thread(struct slip_env *env, u32 id)
{
	struct slip_llc *llc = bpf_map_lookup_elem(&slip_llcs, &id);
	struct slip_llc_info *info = bpf_map_lookup_elem(&slip_llc_infos, &id);

	(void)env;
	if (!llc || !info)
		return -1;
	return claim_of(id, llc, info, llc->idle_mask);
}

static s32 slip_env_claim_masked(struct slip_env *env)
{
	return env->p ? scx_bpf_pick_idle_cpu(env->p->cpus_ptr, 0) : -1;
}

/* ---- classes ------------------------------------------------------------------------------ */

static __always_inline u32 class_by_name(struct slip_config *cfg, const u64 *comm)
{
	u32 i;

	bpf_for(i, 0, SLIP_RULES_MAX) {
		u32 at = i;
		struct slip_rule *r;

		if (at >= cfg->nr_rules)
			break;
		r = bpf_map_lookup_elem(&slip_rules, &at);
		if (r && (comm[0] & r->mask[0]) == r->name[0] && (comm[1] & r->mask[1]) == r->name[1])
			return r->class;
	}
	return SLIP_NO_CLASS;
}

/* Finds a task's class anew when its name changed, and now and then, as it may change cgroups. */
static __always_inline void classify(struct slip_config *cfg, struct task_struct *p,
				     struct task_ctx *tc)
{
	u64 comm[2];
	u32 id;
	struct slip_class *class;

	if (!cfg->nr_rules && !cfg->cgroup_rules)
		return;
	__builtin_memset(comm, 0, sizeof(comm));
	bpf_probe_read_kernel_str(comm, sizeof(comm), p->comm);
	if (comm[0] == tc->comm[0] && comm[1] == tc->comm[1] && tc->class_runs++ < RECLASSIFY_RUNS)
		return;
	tc->comm[0] = comm[0];
	tc->comm[1] = comm[1];
	tc->class_runs = 0;
	id = class_by_name(cfg, comm);
	if (id == SLIP_NO_CLASS && cfg->cgroup_rules) {
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

static __always_inline bool is_masked(struct slip_config *cfg, struct task_struct *p)
{
	return (u32)p->nr_cpus_allowed < cfg->nr_cpus;
}

/* ---- operations --------------------------------------------------------------------------- */

SEC("struct_ops/slip_select_cpu")
s32 BPF_PROG(slip_select_cpu, struct task_struct *p, s32 prev_cpu, u64 wake_flags)
{
	struct slip_config *cfg = config();
	struct task_ctx *tc = task_of(p), *waker = NULL;
	struct slip_env env = { .p = p };
	struct slip_placement to = {};
	struct slip_wake w = {};
	struct slip_cpu *prev, *here;
	struct slip_llc *llc;
	u64 slice;

	if (!cfg || !tc)
		return prev_cpu;
	w.now = bpf_ktime_get_ns();
	w.waker_cpu = bpf_get_smp_processor_id();
	w.prev_cpu = prev_cpu;
	prev = cpu_of(prev_cpu);
	here = cpu_of(w.waker_cpu);
	if (!prev || !here)
		return prev_cpu;
	classify(cfg, p, tc);
	tc->t.queued_at = w.now;
	/* Good enough to pick LLCs by, and cheaper than the kernel's generator. */
	w.rnd = slip_mix(w.now ^ (u64)w.waker_cpu << 48);
	w.waker_llc = here->llc;
	w.prev_llc = prev->llc;
	w.nr_llcs = env.nr_llcs = cfg->nr_llcs;
	if (bpf_cpumask_test_cpu(w.waker_cpu, p->cpus_ptr))
		w.flags |= SLIP_WAKE_WAKER_OK;
	if (bpf_cpumask_test_cpu(prev_cpu, p->cpus_ptr))
		w.flags |= SLIP_WAKE_PREV_OK;
	if (is_masked(cfg, p))
		w.flags |= SLIP_WAKE_MASKED;
	if (wake_flags & SCX_WAKE_SYNC) {
		struct task_struct *current = bpf_get_current_task_btf();

		/* The idle task's hint comes from an interrupt: it will not block, it is idle. */
		if (current->pid)
			waker = task_of(current);
		if (waker) {
			w.flags |= SLIP_WAKE_SYNC;
			if (current->flags & PF_EXITING)
				w.flags |= SLIP_WAKE_EXITING;
			slip_on_sync_wake(&waker->t, w.now);
			llc = bpf_map_lookup_elem(&slip_llcs, &here->llc);
			w.waker_queued = scx_bpf_dsq_nr_queued(SCX_DSQ_LOCAL_ON | w.waker_cpu) +
					 scx_bpf_dsq_nr_queued(DSQ_CPU + w.waker_cpu) +
					 (llc && (llc->handover_mask & slip_bit(here->bit)));
		}
	}
	slip_place(&cfg->params, &env, &tc->t, waker ? &waker->t : NULL, &w, prev->level, &to);
	if (to.path < SLIP_COUNTERS)
		count(to.path);
	if (to.refused)
		count(SLIP_C_HINT_REFUSED);
	tc->path = to.path;
	tc->llc = to.llc;
	if (to.path >= SLIP_PREEMPT)
		return (w.flags & SLIP_WAKE_PREV_OK) || to.path != SLIP_QUEUE_CPU ? prev_cpu : (s32)to.cpu;

	llc = bpf_map_lookup_elem(&slip_llcs, &to.llc);
	if (!llc)
		return prev_cpu;
	slip_on_runnable(&cfg->params, &tc->t, llc, w.now);
	slice = slip_slice(&cfg->params, &tc->t, llc);
	if (to.path == SLIP_HANDOFF && waker) {
		slip_handover_put(llc, here, &waker->t, w.now);
		scx_bpf_dsq_insert(p, DSQ_HANDOVER + to.cpu, slice, 0);
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
	struct slip_config *cfg = config();
	struct task_ctx *tc = task_of(p);
	struct slip_env env = { .p = p };
	u32 cpu = scx_bpf_task_cpu(p), id;
	struct slip_cpu *c = cpu_of(cpu);
	struct slip_llc *llc;
	u64 slice, key;

	if (!cfg || !tc || !c) {
		/* Not ours to decide: the built-in queue loses nobody. */
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, 1000000, enq_flags);
		return;
	}
	env.nr_llcs = cfg->nr_llcs;
	id = c->llc;
	if ((enq_flags & SCX_ENQ_WAKEUP) && tc->path >= SLIP_PREEMPT && !is_masked(cfg, p))
		id = tc->llc;
	llc = slip_env_llc(&env, id);
	if (!llc) {
		scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL, 1000000, enq_flags);
		return;
	}
	slip_on_runnable(&cfg->params, &tc->t, llc, bpf_ktime_get_ns());
	slice = slip_slice(&cfg->params, &tc->t, llc);
	key = slip_queue_key(&tc->t, slice);
	if (is_masked(cfg, p)) {
		scx_bpf_dsq_insert_vtime(p, DSQ_CPU + cpu, slice, key, enq_flags);
		if (slip_env_claim_cpu(&env, cpu))
			scx_bpf_kick_cpu(cpu, SCX_KICK_IDLE);
		return;
	}
	scx_bpf_dsq_insert_vtime(p, id, slice, key, enq_flags);
	/* A CPU may have gone idle since the search; it would sleep beside a waiting task. */
	if (llc->idle_mask)
		kick_idle(&env, id);
	else if ((enq_flags & SCX_ENQ_WAKEUP) && tc->path == SLIP_PREEMPT)
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

static __always_inline bool take_handover(struct slip_llc *llc, struct slip_cpu *of, u32 cpu)
{
	slip_handover_taken(llc, of);
	return scx_bpf_dsq_move_to_local(DSQ_HANDOVER + cpu);
}

static __always_inline bool steal_handover(struct slip_config *cfg, struct slip_llc *llc, u32 id,
					   u32 own_bit)
{
	struct slip_llc_info *info = bpf_map_lookup_elem(&slip_llc_infos, &id);
	u64 mask = llc->handover_mask, now;
	u32 i, bit, cpu;

	if (!info || !(mask & ~slip_bit(own_bit)))
		return 0;
	now = bpf_ktime_get_ns();
	for (i = 0; i < SLIP_STEAL_TRIES; i++) {
		struct slip_cpu *victim;

		bit = slip_next_handover(mask, own_bit);
		if (bit >= 64)
			break;
		mask &= ~slip_bit(bit);
		cpu = cpu_of_bit(info, bit);
		victim = cpu_of(cpu);
		if (!victim || !slip_may_steal(&cfg->params, victim, now))
			continue;
		if (scx_bpf_dsq_move_to_local(DSQ_HANDOVER + cpu)) {
			slip_handover_taken(llc, victim);
			count(SLIP_C_STOLEN);
			return 1;
		}
	}
	return 0;
}

/* Takes the first task of LLC `far`'s queue that may leave it. */
static __always_inline bool pull(struct slip_config *cfg, u32 own, u32 far, u64 now)
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
			    !slip_may_leave(&cfg->params, &tc->t, 0, now))
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
	struct slip_config *cfg = config();
	struct slip_cpu *c = cpu_of(cpu);
	struct slip_env env = {};
	struct slip_heads heads = {};
	struct slip_llc *llc;
	u32 id, from;
	s32 far;

	if (!cfg || !c)
		return;
	env.nr_llcs = cfg->nr_llcs;
	id = c->llc;
	/* slip_choose() puts the hand-over first; asking for the queues' lengths would delay it. */
	llc = bpf_map_lookup_elem(&slip_llcs, &id);
	if (llc && (llc->handover_mask & slip_bit(c->bit)) && take_handover(llc, c, cpu)) {
		count(SLIP_C_RAN_NEXT);
		return;
	}
	llc = slip_env_llc(&env, id);
	if (!llc)
		return;
	heads.has_cpu = scx_bpf_dsq_nr_queued(DSQ_CPU + cpu) > 0;
	heads.has_llc = llc->nr_queued > 0;
	if (heads.has_cpu && heads.has_llc) {
		heads.cpu_key = first_key(DSQ_CPU + cpu);
		heads.llc_key = first_key(id);
	}
	from = slip_choose(&heads);
	/* What was chosen may have been taken meanwhile: then the other queue. */
	if (from == SLIP_FROM_CPU) {
		if (scx_bpf_dsq_move_to_local(DSQ_CPU + cpu) || scx_bpf_dsq_move_to_local(id))
			return;
	} else if (from == SLIP_FROM_LLC) {
		if (scx_bpf_dsq_move_to_local(id) || scx_bpf_dsq_move_to_local(DSQ_CPU + cpu))
			return;
	}
	if (steal_handover(cfg, llc, id, c->bit))
		return;
	if (cfg->nr_llcs > 1) {
		far = slip_pull_from(&env, id, cfg->nr_llcs, random_word());
		if (far >= 0 && pull(cfg, id, far, bpf_ktime_get_ns())) {
			count(SLIP_C_FAR_PULL);
			return;
		}
	}
	if (prev && (prev->scx.flags & SCX_TASK_QUEUED)) {
		/* Nobody else wants the CPU: go on, with a slice of ours, not the kernel's 20 ms. */
		struct task_ctx *tc = task_of(prev);

		if (tc && !prev->scx.slice) {
			prev->scx.slice = slip_slice(&cfg->params, &tc->t, llc);
			count(SLIP_C_KEPT);
		}
		return;
	}
	/*
	 * The CPU goes idle. It may have been idle and kicked for nothing, and then the kernel does
	 * not call update_idle() again.
	 */
	slip_cpu_set_idle(&cfg->params, llc, c, 1);
}

SEC("struct_ops/slip_running")
void BPF_PROG(slip_running, struct task_struct *p)
{
	struct task_ctx *tc = task_of(p);
	u32 cpu = bpf_get_smp_processor_id();
	struct slip_cpu *c = cpu_of(cpu);
	struct slip_llc *llc;

	if (!tc || !c)
		return;
	llc = bpf_map_lookup_elem(&slip_llcs, &c->llc);
	if (!llc)
		return;
	tc->t.weight = tc->class_weight ? tc->class_weight : p->scx.weight;
	slip_on_run(&tc->t, c, llc, bpf_ktime_get_ns());
}

SEC("struct_ops/slip_stopping")
void BPF_PROG(slip_stopping, struct task_struct *p, bool runnable)
{
	struct slip_config *cfg = config();
	struct task_ctx *tc = task_of(p);

	if (cfg && tc && slip_on_stop(&cfg->params, &tc->t, bpf_ktime_get_ns(), runnable))
		count(SLIP_C_HINT_LIED);
}

SEC("struct_ops/slip_tick")
void BPF_PROG(slip_tick, struct task_struct *p)
{
	struct slip_config *cfg = config();
	u32 cpu = bpf_get_smp_processor_id();
	struct slip_cpu *c = cpu_of(cpu);
	struct slip_env env = { .p = NULL };
	struct slip_llc *llc;
	s32 target, idle;

	if (!cfg || !c)
		return;
	env.nr_llcs = cfg->nr_llcs;
	llc = slip_env_llc(&env, c->llc);
	if (!llc)
		return;
	if (slip_tick_wants_kick(&cfg->params, llc, c, bpf_ktime_get_ns()))
		target = c->llc;
	else
		target = slip_tick_far(&cfg->params, &env, c->llc, cfg->nr_llcs, random_word());
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
	struct slip_config *cfg = config();
	struct slip_cpu *c = cpu_of(cpu);
	struct slip_llc *llc;

	if (!cfg || !c)
		return;
	llc = bpf_map_lookup_elem(&slip_llcs, &c->llc);
	if (llc)
		slip_cpu_set_idle(&cfg->params, llc, c, idle);
}

SEC("struct_ops/slip_init_task")
s32 BPF_PROG(slip_init_task, struct task_struct *p, struct scx_init_task_args *args)
{
	struct task_ctx *tc =
		bpf_task_storage_get(&slip_tasks, p, NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	u32 cpu = scx_bpf_task_cpu(p);
	struct slip_cpu *c = cpu_of(cpu);
	struct slip_llc *llc;

	if (!tc)
		return -12; /* ENOMEM */
	llc = c ? bpf_map_lookup_elem(&slip_llcs, &c->llc) : NULL;
	slip_task_init(&tc->t, p->scx.weight, c ? c->llc : 0, llc ? llc->vclock : 0);
	return 0;
}

SEC("struct_ops.s/slip_init")
s32 BPF_PROG(slip_init)
{
	struct slip_config *cfg = config();
	s32 err;
	u32 i;

	if (!cfg)
		return -22; /* EINVAL */
	bpf_for(i, 0, SLIP_LLCS_MAX) {
		if (i >= cfg->nr_llcs)
			break;
		err = scx_bpf_create_dsq(i, -1);
		if (err)
			return err;
	}
	bpf_for(i, 0, SLIP_CPUS_MAX) {
		struct slip_cpu *c = cpu_of(i);

		if (!c || c->llc == ~0u)
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
	.running = (void *)slip_running,
	.stopping = (void *)slip_stopping,
	.update_idle = (void *)slip_update_idle,
	.init_task = (void *)slip_init_task,
	.init = (void *)slip_init,
	.exit = (void *)slip_exit_op,
	.flags = SCX_OPS_KEEP_BUILTIN_IDLE,
	.timeout_ms = 5000,
	.name = "slipstream",
};
