/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The placement decision as a program that any kernel with BPF runs (BPF_PROG_RUN), on inputs from a
 * map instead of a host: src/differential.rs compares it with the native build.
 */
#include "types.h"
#include <bpf/bpf_helpers.h>

#include "slip_policy.h"

char _license[] SEC("license") = "GPL";

#define LLCS 4
#define PER_LLC 8

struct decide {
	struct slip_params params;
	struct slip_task wakee;
	struct slip_task waker;
	struct slip_wake wake;
	struct slip_placement out;
	struct slip_llc llcs[LLCS];
	struct slip_domain domains[LLCS];	/* the domain of both tasks, by LLC */
	u32 prev_level;
	s32 masked_cpu;
	u64 exec_ns;	/* the waker's CPU time at its wake-up */
	u64 stop_ns;	/* and when it leaves its CPU */
	u64 slice;
	u64 key;
	u32 lied;
	u32 blocked;
	u32 trusted;
	u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct decide);
} decide SEC(".maps");

struct slip_env {
	struct decide *d;
};

static struct slip_llc *slip_env_llc(struct slip_env *env, u32 llc)
{
	if (llc >= LLCS)
		return NULL;
	/* The compiler removes the mask as redundant, but the verifier requires it. */
	barrier_var(llc);
	return &env->d->llcs[llc & (LLCS - 1)];
}

static s32 claim_of(struct slip_env *env, u32 id, u64 mask)
{
	struct slip_llc *llc = slip_env_llc(env, id);
	u32 bit = slip_lowest_bit(mask);

	if (!llc || bit >= 64)
		return -1;
	llc->idle_mask &= ~slip_bit(bit);
	return (s32)(id * PER_LLC + bit);
}

static bool slip_env_claim_cpu(struct slip_env *env, u32 cpu)
{
	struct slip_llc *llc = slip_env_llc(env, cpu / PER_LLC);

	if (!llc || !(llc->idle_mask & slip_bit(cpu % PER_LLC)))
		return 0;
	llc->idle_mask &= ~slip_bit(cpu % PER_LLC);
	return 1;
}

static s32 slip_env_claim_core(struct slip_env *env, u32 id)
{
	struct slip_llc *llc = slip_env_llc(env, id);

	if (!llc)
		return -1;
	return claim_of(env, id, llc->idle_mask & (llc->idle_mask >> 1) & 0x5555555555555555ull);
}

static s32 slip_env_claim_thread(struct slip_env *env, u32 id)
{
	struct slip_llc *llc = slip_env_llc(env, id);

	return llc ? claim_of(env, id, llc->idle_mask) : -1;
}

static s32 slip_env_claim_masked(struct slip_env *env)
{
	s32 cpu = env->d->masked_cpu;

	return cpu >= 0 && slip_env_claim_cpu(env, (u32)cpu) ? cpu : -1;
}

SEC("syscall")
int decide_once(void *ctx)
{
	u32 zero = 0;
	struct decide *d = bpf_map_lookup_elem(&decide, &zero);
	struct slip_env env = { .d = d };
	struct slip_domain *domain;
	struct slip_llc *llc;

	(void)ctx;
	if (!d)
		return 1;
	slip_place(&d->params, &env, &d->wakee, &d->waker, &d->wake, d->prev_level, &d->out);
	llc = slip_env_llc(&env, d->out.llc);
	if (!llc)
		return 2;
	domain = &d->domains[d->out.llc & (LLCS - 1)];
	slip_on_runnable(&d->params, &d->wakee, llc, domain, d->wake.now);
	d->slice = slip_slice(&d->params, &d->wakee, llc);
	d->key = slip_queue_key(&d->wakee, domain, d->slice);
	slip_on_sync_wake(&d->waker, d->exec_ns);
	d->trusted = slip_trusted(&d->params, &d->waker);
	d->lied = slip_account(&d->params, &d->waker, d->out.llc, llc,
			       &d->domains[d->waker.llc & (LLCS - 1)], domain, d->stop_ns,
			       d->blocked != 0);
	return 0;
}
