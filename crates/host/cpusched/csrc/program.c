/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The BPF program itself, compiled for the simulator: the source text that the kernel runs, on a
 * simulated kernel. Its kfuncs end in src/sched/kernel.rs, which has the queues, the idle CPUs and
 * the order in which the kernel calls the program; this file has its maps, tasks and run queues.
 *
 * The program's state is global, as in the kernel, so a process simulates one host at a time.
 */
#define const /* the configuration is written before each run */

/* First the program's includes: types.h, through kernel.h. */
#include "slipstream.bpf.c"

#undef const
#include <stdlib.h>
#include <string.h>

#define HOST_MAPS	32
#define HOST_STORAGES	4

struct host_task {
	struct task_struct p;
	unsigned long mask[SLIP_CPUS_MAX / 64];
	struct css_set css;
	struct cgroup cgroup;
	struct kernfs_node kn;
	void *storage[HOST_STORAGES];
};

struct host_map {
	void *map;
	char *data;
	u32 entries;
	u32 value_size;
};

static struct host_map maps[HOST_MAPS];
static void *storages[HOST_STORAGES];
static struct host_task **tasks;
static u32 nr_tasks;
static struct host_task idle_task;
static struct task_struct *currents[SLIP_CPUS_MAX];
static struct rq rqs[SLIP_CPUS_MAX];
struct rq runqueues;
u32 slip_host_cpu;

static struct {
	void *timer;
	void *map;
	int (*callback)(void *map, int *key, void *timer);
} timers[4];

/* In src/sched/kernel.rs. */
u64 slip_k_now(void);
s32 slip_k_create_dsq(u64 dsq);
void slip_k_insert(u32 task, u64 dsq, u64 slice, u64 vtime, u32 by_vtime, u64 flags);
u32 slip_k_move_to_local(u64 dsq);
u32 slip_k_move(u32 task, u64 dsq, u64 flags);
s32 slip_k_nr_queued(u64 dsq);
void slip_k_kick(s32 cpu, u64 flags);
u32 slip_k_claim_idle(s32 cpu);
s32 slip_k_pick_idle(const unsigned long *mask, u64 flags);
s32 slip_k_task_cpu(u32 task);
s32 slip_k_at(u64 dsq, u32 index, u32 reverse);
u32 slip_k_reenqueue_local(void);
void slip_k_timer(u32 timer, u64 ns);

struct rq *slip_host_rq(u32 cpu) { return &rqs[cpu]; }

static u32 id_of(struct task_struct *p)
{
	return (u32)p->pid - 1;
}

/* ---- called by the program ---------------------------------------------------------------- */

u64 scx_bpf_now(void) { return slip_k_now(); }

s32 scx_bpf_create_dsq(u64 dsq, s32 node)
{
	(void)node;
	return slip_k_create_dsq(dsq);
}

void scx_bpf_dsq_insert(struct task_struct *p, u64 dsq, u64 slice, u64 flags)
{
	slip_k_insert(id_of(p), dsq, slice, 0, 0, flags);
}

void scx_bpf_dsq_insert_vtime(struct task_struct *p, u64 dsq, u64 slice, u64 vtime, u64 flags)
{
	slip_k_insert(id_of(p), dsq, slice, vtime, 1, flags);
}

bool scx_bpf_dsq_move_to_local(u64 dsq) { return slip_k_move_to_local(dsq); }

bool scx_bpf_dsq_move(struct bpf_iter_scx_dsq *it, struct task_struct *p, u64 dsq, u64 flags)
{
	(void)it;
	return slip_k_move(id_of(p), dsq, flags);
}

s32 scx_bpf_dsq_nr_queued(u64 dsq) { return slip_k_nr_queued(dsq); }
void scx_bpf_kick_cpu(s32 cpu, u64 flags) { slip_k_kick(cpu, flags); }
bool scx_bpf_test_and_clear_cpu_idle(s32 cpu) { return slip_k_claim_idle(cpu); }

s32 scx_bpf_pick_idle_cpu(struct cpumask *mask, u64 flags)
{
	return slip_k_pick_idle(mask->bits, flags);
}

s32 scx_bpf_task_cpu(struct task_struct *p) { return slip_k_task_cpu(id_of(p)); }

/* The words of the iterator: queue, next index, direction. */
int bpf_iter_scx_dsq_new(struct bpf_iter_scx_dsq *it, u64 dsq, u64 flags)
{
	it->__opaque[0] = dsq;
	it->__opaque[1] = 0;
	it->__opaque[2] = flags != 0;
	return 0;
}

struct task_struct *bpf_iter_scx_dsq_next(struct bpf_iter_scx_dsq *it)
{
	s32 id = slip_k_at(it->__opaque[0], (u32)it->__opaque[1]++, (u32)it->__opaque[2]);

	return id < 0 ? NULL : &tasks[id]->p;
}

void bpf_iter_scx_dsq_destroy(struct bpf_iter_scx_dsq *it) { (void)it; }

bool bpf_cpumask_test_cpu(u32 cpu, struct cpumask *mask)
{
	return cpu < SLIP_CPUS_MAX && (mask->bits[cpu / 64] >> (cpu % 64) & 1);
}

u32 bpf_cpumask_first(struct cpumask *mask)
{
	for (u32 cpu = 0; cpu < SLIP_CPUS_MAX; cpu++)
		if (bpf_cpumask_test_cpu(cpu, mask))
			return cpu;
	return SLIP_CPUS_MAX;
}

void bpf_rcu_read_lock(void) {}
void bpf_rcu_read_unlock(void) {}
u32 scx_bpf_reenqueue_local(void) { return slip_k_reenqueue_local(); }
/* libbpf treats a suffix after three underscores as a variant of the same function. */
u32 scx_bpf_reenqueue_local___count(void) { return slip_k_reenqueue_local(); }
void scx_bpf_reenqueue_local___void(void) { slip_k_reenqueue_local(); }
void scx_bpf_dump_bstr(char *fmt, unsigned long long *data, u32 size)
{
	(void)fmt;
	(void)data;
	(void)size;
}

void *slip_host_lookup(void *map, u32 type, u32 entries, u32 key_size, u32 value_size, void *key)
{
	struct host_map *m = maps;
	u32 index;

	/* The loader fills hash maps; they are empty here. */
	if ((type != BPF_MAP_TYPE_ARRAY && type != BPF_MAP_TYPE_PERCPU_ARRAY) || key_size != 4)
		return NULL;
	while (m->map && m->map != map)
		if (++m == maps + HOST_MAPS)
			abort();
	if (!m->map) {
		m->map = map;
		m->data = calloc(entries, value_size);
		m->entries = entries;
		m->value_size = value_size;
		if (!m->data)
			abort();
	}
	memcpy(&index, key, sizeof(index));
	return index < m->entries ? m->data + (size_t)index * m->value_size : NULL;
}

void *slip_host_storage(void *map, u32 value_size, struct task_struct *p, u64 flags)
{
	struct host_task *t = (struct host_task *)p;
	u32 i = 0;

	while (storages[i] && storages[i] != map)
		if (++i == HOST_STORAGES)
			abort();
	storages[i] = map;
	if (!t->storage[i] && (flags & BPF_LOCAL_STORAGE_GET_F_CREATE)) {
		t->storage[i] = calloc(1, value_size);
		if (!t->storage[i])
			abort();
	}
	return t->storage[i];
}

struct task_struct *slip_host_current(void)
{
	struct task_struct *p = currents[slip_host_cpu];

	return p ? p : &idle_task.p;
}

void slip_host_copy(void *to, void *from, u32 size) { memcpy(to, from, size); }

long slip_host_copy_str(void *to, u32 size, void *from)
{
	u32 length = from && size ? (u32)strnlen(from, size - 1) : 0;

	if (size) {
		memcpy(to, from ? from : "", length);
		((char *)to)[length] = 0;
	}
	return length + 1;
}

long slip_host_timer(void *timer, void *map, void *callback, u64 ns)
{
	u32 i = 0;

	while (timers[i].timer && timers[i].timer != timer)
		if (++i == sizeof(timers) / sizeof(timers[0]))
			abort();
	timers[i].timer = timer;
	if (map)
		timers[i].map = map;
	if (callback)
		timers[i].callback = (int (*)(void *, int *, void *))callback;
	if (ns)
		slip_k_timer(i, ns);
	return 0;
}

/* ---- called by the simulator -------------------------------------------------------------- */

/* The program's global variables, found by build.rs. */
static struct { void *at; size_t size; } globals[] = {
#include "globals.inc"
};

/* As at load: everything is zero except the values that the loader fills in. */
void slip_p_reset(struct slip_params *params, u32 nr_llcs, u32 nr_cpus, u32 *llc_of, u32 *bit_of,
		  u32 *core_of)
{
	u32 i, online = 0;

	for (i = 0; i < sizeof(globals) / sizeof(globals[0]); i++)
		memset(globals[i].at, 0, globals[i].size);
	for (i = 0; i < HOST_MAPS; i++)
		free(maps[i].data);
	memset(maps, 0, sizeof(maps));
	memset(storages, 0, sizeof(storages));
	memset(timers, 0, sizeof(timers));
	memset(currents, 0, sizeof(currents));
	memset(rqs, 0, sizeof(rqs));
	for (i = 0; i < nr_tasks; i++) {
		for (u32 s = 0; s < HOST_STORAGES; s++)
			free(tasks[i]->storage[s]);
		memset(tasks[i]->storage, 0, sizeof(tasks[i]->storage));
	}
	for (i = 0; i < SLIP_CPUS_MAX; i++) {
		slip_cpus[i].cpu.llc = i < nr_cpus ? llc_of[i] : ~0u;
		if (slip_cpus[i].cpu.llc == ~0u)
			continue;
		online++;
		slip_cpus[i].cpu.bit = bit_of[i];
		slip_llcs[llc_of[i]].llc.nr_cpus++;
		slip_llcs[llc_of[i]].llc.saturated = 1;
		slip_llcs[llc_of[i]].cpu_of_bit[bit_of[i]] = i;
#ifdef SLIP_CONFIG_ONLINE
		slip_config.online[i / 64] |= 1ull << (i % 64);
#endif
	}
	for (i = 0; i < nr_cpus; i++) {
		bool is_first = 0, is_second = 0;

		if (llc_of[i] == ~0u)
			continue;
		for (u32 j = 0; j < nr_cpus; j++) {
			if (i == j || llc_of[j] == ~0u || core_of[i] != core_of[j])
				continue;
			is_first |= bit_of[j] == bit_of[i] + 1;
			is_second |= bit_of[j] + 1 == bit_of[i];
		}
		if (is_first)
			slip_llcs[llc_of[i]].pair_first |= 1ull << bit_of[i];
		else if (!is_second)
			slip_llcs[llc_of[i]].single |= 1ull << bit_of[i];
	}
	slip_config.params = *params;
	slip_config.nr_llcs = nr_llcs;
	slip_config.nr_cpus = online;
}

/* A new host: no tasks. */
void slip_p_clear(void)
{
	for (u32 i = 0; i < nr_tasks; i++) {
		for (u32 s = 0; s < HOST_STORAGES; s++)
			free(tasks[i]->storage[s]);
		free(tasks[i]);
	}
	free(tasks);
	tasks = NULL;
	nr_tasks = 0;
}

void slip_p_add_task(u32 weight, unsigned long *mask, u32 allowed)
{
	struct host_task *t = calloc(1, sizeof(*t));
	struct host_task **grown = realloc(tasks, (nr_tasks + 1) * sizeof(*tasks));

	if (!t || !grown)
		abort();
	tasks = grown;
	tasks[nr_tasks++] = t;
	t->p.pid = (s32)nr_tasks;
	t->p.scx.weight = weight;
	t->p.nr_cpus_allowed = (int)allowed;
	memcpy(t->mask, mask, sizeof(t->mask));
	t->p.cpus_ptr = (struct cpumask *)t->mask;
	t->css.dfl_cgrp = &t->cgroup;
	t->cgroup.kn = &t->kn;
	t->p.cgroups = &t->css;
	memcpy(t->p.comm, "task", 5);
}

void slip_p_set_mask(u32 task, unsigned long *mask, u32 allowed)
{
	memcpy(tasks[task]->mask, mask, sizeof(tasks[task]->mask));
	tasks[task]->p.nr_cpus_allowed = (int)allowed;
}

u64 slip_p_slice(u32 task) { return tasks[task]->p.scx.slice; }
void slip_p_set_slice(u32 task, u64 slice) { tasks[task]->p.scx.slice = slice; }
void slip_p_set_vtime(u32 task, u64 vtime) { tasks[task]->p.scx.dsq_vtime = vtime; }

void slip_p_set_queued(u32 task, u32 queued)
{
	struct sched_ext_entity *scx = &tasks[task]->p.scx;

	scx->flags = queued ? scx->flags | SCX_TASK_QUEUED : scx->flags & ~SCX_TASK_QUEUED;
}

void slip_p_set_exec(u32 task, u64 sum, u64 start)
{
	tasks[task]->p.se.sum_exec_runtime = sum;
	tasks[task]->p.se.exec_start = start;
}

/* The CPU that runs the program from now on, its run queue, and its running task; -1: none. */
void slip_p_enter(u32 cpu, s32 current, u32 nr_running, u64 now)
{
	slip_host_cpu = cpu;
	currents[cpu] = current < 0 ? NULL : &tasks[current]->p;
	rqs[cpu].nr_running = nr_running;
	rqs[cpu].clock = now;
	rqs[cpu].clock_task = now;
}

void slip_p_set_real_time(u32 cpu, u32 tasks) { rqs[cpu].rt.rt_nr_running = tasks; }

s32 slip_p_init(void)
{
#ifdef SLIP_OP_init
	return slipstream.init();
#else
	return 0;
#endif
}

s32 slip_p_init_task(u32 task)
{
#ifdef SLIP_OP_init_task
	struct scx_init_task_args args = { .fork = 0 };

	return slipstream.init_task(&tasks[task]->p, &args);
#else
	return 0;
#endif
}

void slip_p_enable(u32 task)
{
	struct task_struct *p = &tasks[task]->p;

	(void)p;
#ifdef SLIP_OP_enable
	slipstream.enable(p);
#endif
#ifdef SLIP_OP_set_weight
	slipstream.set_weight(p, p->scx.weight);
#endif
#ifdef SLIP_OP_set_cpumask
	slipstream.set_cpumask(p, p->cpus_ptr);
#endif
}

/* The entry code of a BPF program disables the migration of the current task until it ends; entries nest. */
static struct task_struct *enter_program(void)
{
	struct task_struct *current = slip_host_current();

	current->migration_disabled++;
	return current;
}

static void leave_program(struct task_struct *current) { current->migration_disabled--; }

s32 slip_p_select_cpu(u32 task, s32 prev, u64 flags)
{
	struct task_struct *current = enter_program();
	s32 cpu = slipstream.select_cpu(&tasks[task]->p, prev, flags);

	leave_program(current);
	return cpu;
}

void slip_p_enqueue(u32 task, u64 flags)
{
	struct task_struct *current = enter_program();

	slipstream.enqueue(&tasks[task]->p, flags);
	leave_program(current);
}

void slip_p_dispatch(s32 cpu, s32 prev)
{
	struct task_struct *current = enter_program();

	slipstream.dispatch(cpu, prev < 0 ? NULL : &tasks[prev]->p);
	leave_program(current);
}

void slip_p_tick(u32 task)
{
#ifdef SLIP_OP_tick
	struct task_struct *current = enter_program();

	slipstream.tick(&tasks[task]->p);
	leave_program(current);
#endif
}

void slip_p_running(u32 task)
{
#ifdef SLIP_OP_running
	slipstream.running(&tasks[task]->p);
#endif
}

void slip_p_stopping(u32 task, u32 runnable)
{
	(void)runnable;
#ifdef SLIP_OP_stopping
	slipstream.stopping(&tasks[task]->p, runnable != 0);
#endif
}

void slip_p_quiescent(u32 task)
{
#ifdef SLIP_OP_quiescent
	slipstream.quiescent(&tasks[task]->p, 1);
#endif
}

void slip_p_update_idle(s32 cpu, u32 idle)
{
#ifdef SLIP_OP_update_idle
	slipstream.update_idle(cpu, idle != 0);
#endif
}

void slip_p_cpu_release(s32 cpu)
{
#ifdef SLIP_OP_cpu_release
	struct scx_cpu_release_args args = { 0 };
	struct task_struct *current = enter_program();

	slipstream.cpu_release(cpu, &args);
	leave_program(current);
#endif
}

u32 slip_p_migration_disabled(u32 task) { return tasks[task]->p.migration_disabled; }

u64 slip_p_ops_flags(void) { return slipstream.flags; }

void slip_p_cpu_acquire(s32 cpu)
{
#ifdef SLIP_OP_cpu_acquire
	slipstream.cpu_acquire(cpu, NULL);
#endif
}

void slip_p_timer(u32 timer)
{
	int key = 0;

	if (timers[timer].callback)
		timers[timer].callback(timers[timer].map, &key, timers[timer].timer);
}

/* Counters, in the order of the header. */
void slip_p_counters(u64 *out)
{
	for (u32 i = 0; i < SLIP_COUNTERS; i++) {
		u64 *n = bpf_map_lookup_elem(&slip_stats, &i);

		out[i] = n ? *n : 0;
	}
}
