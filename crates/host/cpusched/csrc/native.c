/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The policy compiled for the host simulator: its slip_env_*() functions over plain arrays, and
 * one exported function per inline one. src/policy.rs mirrors the layouts and checks them.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;
typedef int64_t s64;

#include "slip_policy.h"

/* CPU `llc * cpus_per_llc + bit` is bit `bit` of LLC `llc`; hardware threads of a core adjoin. */
struct slip_env {
	struct slip_llc *llcs;
	struct slip_cpu *cpus;
	u32 nr_llcs;
	u32 nr_cpus;
	u32 cpus_per_llc;
	u32 threads_per_core;	/* 1 or 2 */
	s32 masked_cpu;		/* the one CPU of a masked task, or -1 */
	u32 pad;
};

static bool slip_env_claim_cpu(struct slip_env *env, u32 cpu)
{
	struct slip_llc *llc;
	u64 bit;

	if (cpu >= env->nr_cpus)
		return 0;
	llc = &env->llcs[env->cpus[cpu].llc];
	bit = slip_bit(env->cpus[cpu].bit);
	if (!(llc->idle_mask & bit))
		return 0;
	llc->idle_mask &= ~bit;
	return 1;
}

static s32 claim_of(struct slip_env *env, u32 llc, u64 mask)
{
	u32 bit = slip_lowest_bit(mask);

	if (bit >= 64)
		return -1;
	env->llcs[llc].idle_mask &= ~slip_bit(bit);
	return (s32)(llc * env->cpus_per_llc + bit);
}

static s32 slip_env_claim_core(struct slip_env *env, u32 llc)
{
	u64 idle = env->llcs[llc].idle_mask;

	if (env->threads_per_core == 2)
		idle &= (idle >> 1) & 0x5555555555555555ull;
	return claim_of(env, llc, idle);
}

static s32 slip_env_claim_thread(struct slip_env *env, u32 llc)
{
	return claim_of(env, llc, env->llcs[llc].idle_mask);
}

static s32 slip_env_claim_masked(struct slip_env *env)
{
	if (env->masked_cpu < 0 || !slip_env_claim_cpu(env, (u32)env->masked_cpu))
		return -1;
	return env->masked_cpu;
}

static struct slip_llc *slip_env_llc(struct slip_env *env, u32 llc)
{
	return llc < env->nr_llcs ? &env->llcs[llc] : NULL;
}

/* Sizes in the order of policy.rs's LAYOUT. */
void slip_n_layout(u32 *sizes)
{
	sizes[0] = sizeof(struct slip_params);
	sizes[1] = sizeof(struct slip_task);
	sizes[2] = sizeof(struct slip_cpu);
	sizes[3] = sizeof(struct slip_llc);
	sizes[4] = sizeof(struct slip_wake);
	sizes[5] = sizeof(struct slip_placement);
	sizes[6] = sizeof(struct slip_env);
	sizes[7] = sizeof(struct slip_heads);
	sizes[8] = sizeof(struct slip_domain);
}

void slip_n_params_default(struct slip_params *p) { slip_params_default(p); }

void slip_n_place(const struct slip_params *p, struct slip_env *env, const struct slip_task *wakee,
		  const struct slip_task *waker, const struct slip_wake *w, u32 prev_level,
		  struct slip_placement *out)
{
	slip_place(p, env, wakee, waker, w, prev_level, out);
}

void slip_n_llc_update(const struct slip_params *p, struct slip_llc *llc) { slip_llc_update(p, llc); }

void slip_n_cpu_set_idle(const struct slip_params *p, struct slip_llc *llc,
			 const struct slip_cpu *cpu, u32 idle)
{
	slip_cpu_set_idle(p, llc, cpu, idle != 0);
}

u32 slip_n_llc_load(const struct slip_llc *llc) { return slip_llc_load(llc); }

void slip_n_task_init(struct slip_task *t, u32 weight, u32 llc, u64 vclock)
{
	slip_task_init(t, weight, llc, vclock);
}

u64 slip_n_slice(const struct slip_params *p, const struct slip_task *t, const struct slip_llc *llc)
{
	return slip_slice(p, t, llc);
}

void slip_n_on_runnable(const struct slip_params *p, struct slip_task *t, struct slip_llc *llc,
			struct slip_domain *d, u64 now)
{
	slip_on_runnable(p, t, llc, d, now);
}

void slip_n_on_kept(const struct slip_params *p, struct slip_task *t, const struct slip_domain *d)
{
	slip_on_kept(p, t, d);
}

void slip_n_on_turn(struct slip_task *t) { slip_on_turn(t); }

void slip_n_change_domain(struct slip_task *t, const struct slip_domain *from,
			  const struct slip_domain *to)
{
	slip_change_domain(t, from, to);
}

u64 slip_n_queue_key(const struct slip_task *t, const struct slip_domain *d, u64 slice)
{
	return slip_queue_key(t, d, slice);
}

u64 slip_n_charge(struct slip_task *t, u64 exec_ns) { return slip_charge(t, exec_ns); }

void slip_n_on_sync_wake(struct slip_task *t, u64 exec_ns) { slip_on_sync_wake(t, exec_ns); }

u32 slip_n_account(const struct slip_params *p, struct slip_task *t, u32 id, struct slip_llc *llc,
		   const struct slip_domain *from, struct slip_domain *d, u64 exec_ns, u32 blocked)
{
	return slip_account(p, t, id, llc, from, d, exec_ns, blocked != 0);
}

u32 slip_n_may_leave(const struct slip_params *p, const struct slip_task *t, u32 saturated, u64 now)
{
	return slip_may_leave(p, t, saturated != 0, now);
}

s32 slip_n_pick_two(const struct slip_params *p, struct slip_env *env, u32 home, u32 nr_llcs, u64 rnd, u32 busiest)
{
	return slip_pick_two(p, env, 0, home, nr_llcs, rnd, busiest != 0);
}

u32 slip_n_handover_put(const struct slip_params *p, struct slip_llc *llc, struct slip_cpu *cpu,
			struct slip_task *waker, u64 now)
{
	return slip_handover_put(p, llc, cpu, waker, now);
}

void slip_n_handover_taken(struct slip_llc *llc, const struct slip_cpu *cpu)
{
	slip_handover_taken(llc, cpu);
}

u32 slip_n_tick_wants_kick(const struct slip_params *p, const struct slip_llc *llc,
			   const struct slip_cpu *cpu, u64 now)
{
	return slip_tick_wants_kick(p, llc, cpu, now);
}

u32 slip_n_trusted(const struct slip_params *p, const struct slip_task *waker)
{
	return slip_trusted(p, waker);
}

u32 slip_n_tick_wants_room(const struct slip_params *p, const struct slip_task *running,
			   const struct slip_cpu *cpu, u64 now)
{
	return slip_tick_wants_room(p, running, cpu, now);
}

s32 slip_n_tick_far(const struct slip_params *p, struct slip_env *env, u32 home, u32 nr_llcs, u64 rnd)
{
	return slip_tick_far(p, env, home, nr_llcs, rnd);
}

u32 slip_n_choose(const struct slip_heads *h) { return slip_choose(h); }

u32 slip_n_next_handover(u64 mask, u32 bit) { return slip_next_handover(mask, bit); }

u32 slip_n_may_steal(const struct slip_params *p, const struct slip_cpu *victim, u64 now)
{
	return slip_may_steal(p, victim, now);
}

s32 slip_n_pull_from(const struct slip_params *p, struct slip_env *env, u32 home, u32 nr_llcs, u64 rnd)
{
	return slip_pull_from(p, env, home, nr_llcs, rnd);
}

u32 slip_n_claim_thread(struct slip_env *env, u32 llc, s32 *cpu)
{
	*cpu = slip_env_claim_thread(env, llc);
	return *cpu >= 0;
}

u32 slip_n_count_bits(u64 x) { return slip_count_bits(x); }
u32 slip_n_lowest_bit(u64 x) { return slip_lowest_bit(x); }
