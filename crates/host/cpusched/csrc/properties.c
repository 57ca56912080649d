/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * A random walk over the policy, built with AddressSanitizer and UndefinedBehaviorSanitizer by
 * tests/it/sanitized.rs. All inputs are drawn from their whole range, sensible or not: the policy
 * must stay within its arrays and keep its guarantees. Usage: properties SEED STEPS.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "native.c"

#define LLCS 5
#define PER_LLC 64
#define CPUS (LLCS * PER_LLC)
#define TASKS 50

static u64 state;
static u64 word(void) { return slip_mix(state++); }
static u64 below(u64 n) { return word() % n; }

#define CHECK(cond)                                                                     \
	do {                                                                            \
		if (!(cond)) {                                                          \
			fprintf(stderr, "line %d: %s does not hold at step %llu\n",     \
				__LINE__, #cond, (unsigned long long)step);             \
			exit(1);                                                        \
		}                                                                       \
	} while (0)

int main(int argc, char **argv)
{
	/* On the heap, each in its own allocation, so that ASan sees the first byte beyond. */
	struct slip_llc *llcs = calloc(LLCS, sizeof(*llcs));
	struct slip_cpu *cpus = calloc(CPUS, sizeof(*cpus));
	struct slip_task *tasks = calloc(TASKS, sizeof(*tasks));
	struct slip_domain *domains = calloc(LLCS * SLIP_DOMAINS, sizeof(*domains));
	struct slip_params p;
	u64 steps, step, now = 0;

	if (argc != 3)
		return 2;
	state = strtoull(argv[1], NULL, 10);
	steps = strtoull(argv[2], NULL, 10);
	slip_params_default(&p);
	for (u32 i = 0; i < LLCS; i++)
		llcs[i].nr_cpus = PER_LLC;
	for (u32 i = 0; i < CPUS; i++) {
		cpus[i].llc = i / PER_LLC;
		cpus[i].bit = i % PER_LLC;
	}
	for (u32 i = 0; i < TASKS; i++)
		slip_task_init(&tasks[i], (u32)below(10001), (u32)below(LLCS), 0);

	for (step = 0; step < steps; step++) {
		struct slip_env env = {
			.llcs = llcs, .cpus = cpus, .nr_llcs = LLCS, .nr_cpus = CPUS,
			.cpus_per_llc = PER_LLC, .threads_per_core = 1 + (u32)below(2),
			.masked_cpu = (s32)below(CPUS + 1) - 1,
		};
		struct slip_task *t = &tasks[below(TASKS)];
		struct slip_cpu *cpu = &cpus[below(CPUS)];
		struct slip_llc *llc = &llcs[cpu->llc];
		struct slip_domain *from = &domains[t->llc * SLIP_DOMAINS + t->domain];
		struct slip_domain *d = &domains[cpu->llc * SLIP_DOMAINS + t->domain];

		now += below(3000000);
		switch (below(11)) {
		case 0: {
			u64 before[LLCS], claimed = 0, grown = 0;
			struct slip_wake w = {
				.now = now, .rnd = word(), .flags = (u32)below(64), .nr_llcs = LLCS,
				.waker_cpu = (u32)below(CPUS), .prev_cpu = (u32)below(CPUS),
				.waker_queued = (u32)below(2),
			};
			struct slip_placement out;

			w.waker_llc = cpus[w.waker_cpu].llc;
			w.prev_llc = cpus[w.prev_cpu].llc;
			t->llc_mask = below(3) ? 0 : word();
			for (u32 i = 0; i < LLCS; i++)
				before[i] = llcs[i].idle_mask;
			slip_place(&p, &env, t, below(4) ? &tasks[below(TASKS)] : NULL, &w,
				   (u32)below(4), &out);
			for (u32 i = 0; i < LLCS; i++) {
				claimed += slip_count_bits(before[i] & ~llcs[i].idle_mask);
				grown |= llcs[i].idle_mask & ~before[i];
			}
			CHECK(out.path < SLIP_PATHS && out.cpu < CPUS && out.llc < LLCS);
			CHECK(!grown);
			CHECK(claimed == (out.path >= SLIP_PREV_IDLE && out.path <= SLIP_MASK_IDLE));
			if (out.path == SLIP_LLC_CORE || out.path == SLIP_LLC_THREAD ||
			    out.path == SLIP_FAR_IDLE)
				CHECK(cpus[out.cpu].llc == out.llc);
			/* A class's LLCs bind every path but those of the task's own CPU mask. */
			if (out.path < SLIP_MASK_IDLE + !(w.flags & SLIP_WAKE_MASKED) * 3 &&
			    out.path != SLIP_MASK_IDLE && out.path != SLIP_QUEUE_CPU &&
			    slip_lowest_bit(t->llc_mask) < LLCS)
				CHECK(slip_llc_ok(t, out.llc));
			break;
		}
		case 1:
			slip_cpu_set_idle(&p, llc, cpu, below(2));
			break;
		case 2:
			llc->nr_queued = (u32)below(200);
			slip_llc_update(&p, llc);
			break;
		case 3: {
			u64 clock = d->clock, vclock = llc->vclock, vtime = t->vtime;
			u64 exec_ns = t->exec_ns + below(3000000);
			bool blocked = below(2), moved = t->llc != cpu->llc;
			s64 lag = (s64)(t->vtime - from->clock);
			u32 queued = t->queued;

			slip_account(&p, t, cpu->llc, llc, from, d, exec_ns, blocked);
			CHECK(!slip_before(d->clock, clock) && !slip_before(llc->vclock, vclock));
			/* Only the debt of a task that ran alone is bounded. */
			CHECK(moved || !queued || !slip_before(t->vtime, vtime));
			/* A move neither loses nor increases credit or debt. */
			if (moved && lag >= -(s64)SLIP_LAG_MAX_NS && lag <= 1000000000)
				CHECK(!queued || (s64)(t->vtime - clock) >= lag);
			CHECK(!slip_before(d->clock + d->offset, llc->vclock - p.slice_max_ns));
			CHECK(!blocked || !slip_before(t->vtime, d->clock - p.slice_max_ns));
			CHECK(t->runs_on_llc >= 1 && t->llc == cpu->llc);
			CHECK(t->block_ns <= 8 * p.wake_idle_ns && t->level < SLIP_LEVELS);
			CHECK(t->honest <= p.trust_after && !t->handed + !t->sync_ns > 0);
			break;
		}
		case 4:
			slip_on_sync_wake(t, t->exec_ns + below(3000000));
			CHECK(t->sync_ns);
			break;
		case 5: {
			u64 slice = slip_slice(&p, t, llc);

			slip_on_runnable(&p, t, llc, d, now);
			CHECK(slice >= p.slice_min_ns && slice <= p.slice_max_ns);
			CHECK(!slip_before(slip_queue_key(t, d, slice), t->vtime + d->offset));
			CHECK(!slip_before(t->vtime, d->clock - SLIP_LAG_MAX_NS));
			CHECK(!slip_before(d->clock + d->offset, llc->vclock - p.slice_max_ns));
			CHECK(!slip_before(llc->vclock, d->clock + d->offset));
			break;
		}
		case 6: {
			bool waits = llc->handover_mask & slip_bit(cpu->bit);
			bool trusted = slip_handover_put(&p, llc, cpu, t, now);

			CHECK(trusted == (t->honest == p.trust_after));
			CHECK(!slip_tick_wants_room(&p, t, cpu, now));
			CHECK(slip_tick_wants_room(&p, t, cpu, now + p.wake_idle_ns) == trusted);
			CHECK(!slip_tick_wants_kick(&p, llc, cpu, now));
			CHECK(slip_tick_wants_kick(&p, llc, cpu, now + p.wake_idle_ns) ==
			      (!trusted || waits));
			break;
		}
		case 9: {
			struct slip_domain *to = &domains[t->llc * SLIP_DOMAINS + below(SLIP_DOMAINS)];
			s64 lag = (s64)(t->vtime - from->clock), after;

			slip_change_domain(t, from, to);
			t->domain = (u32)(to - &domains[t->llc * SLIP_DOMAINS]);
			after = (s64)(t->vtime - to->clock);
			CHECK(after >= -(s64)SLIP_LAG_MAX_NS && after <= 1000000000);
			CHECK(after == lag || lag < -(s64)SLIP_LAG_MAX_NS || lag > 1000000000);
			break;
		}
		case 10: {
			struct slip_heads h = {
				.cpu_key = below(8), .llc_key = below(8), .prev_key = below(8),
				.has_cpu = (u32)below(2), .has_llc = (u32)below(2),
				.has_prev = (u32)below(2),
			};
			u32 chosen = slip_choose(&h);

			/* A chosen task exists, and no existing one comes before it. */
			CHECK(chosen != SLIP_FROM_PREV || (h.has_prev && (h.has_cpu || h.has_llc)));
			CHECK(chosen != SLIP_FROM_PREV || !h.has_cpu || h.prev_key < h.cpu_key);
			CHECK(chosen != SLIP_FROM_PREV || !h.has_llc || h.prev_key < h.llc_key);
			CHECK(chosen != SLIP_FROM_CPU || (h.has_cpu && (!h.has_llc || h.cpu_key <= h.llc_key)));
			CHECK(chosen != SLIP_FROM_LLC || (h.has_llc && (!h.has_cpu || h.llc_key < h.cpu_key)));
			CHECK(chosen != SLIP_FROM_NONE || (!h.has_cpu && !h.has_llc));
			break;
		}
		case 7:
			slip_handover_taken(llc, cpu);
			CHECK(!slip_tick_wants_kick(&p, llc, cpu, ~0ull));
			break;
		case 8: {
			u32 home = (u32)below(LLCS);
			s32 far = slip_pull_from(&p, &env, home, LLCS, word());

			CHECK(far < LLCS && far != (s32)home);
			CHECK(far < 0 || llcs[far].nr_queued);
			far = slip_tick_far(&p, &env, home, LLCS, word());
			CHECK(far < LLCS && far != (s32)home);
			CHECK(far < 0 || llcs[far].idle_mask);
			break;
		}
		}
	}
	free(llcs);
	free(cpus);
	free(tasks);
	free(domains);
	printf("%llu steps\n", (unsigned long long)steps);
	return 0;
}
