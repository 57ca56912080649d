/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The kernel's types, limited to the fields that this program uses. Written by hand from the names and
 * meanings in Linux's documentation; CO-RE relocates the offsets to those of the running kernel.
 * Structs named in prototypes of kernel functions need a body, or the prototypes do not match.
 */
#ifndef SLIP_KERNEL_H
#define SLIP_KERNEL_H

#include "types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>

#define __co_re __attribute__((preserve_access_index))

struct cpumask {
	unsigned long bits[1];
} __co_re;

struct kernfs_node {
	u64 id;
} __co_re;

struct cgroup {
	struct kernfs_node *kn;
} __co_re;

struct css_set {
	struct cgroup *dfl_cgrp;
} __co_re;

struct sched_ext_entity {
	u64 slice;
	u64 dsq_vtime;
	u32 flags;
	u32 weight;
} __co_re;

struct sched_entity {
	u64 exec_start;
	u64 sum_exec_runtime;
} __co_re;

/* The run queue's real-time tasks. */
struct rt_rq {
	u32 rt_nr_running;
} __co_re;

/* A CPU's run queue. */
struct rq {
	u32 nr_running;
	struct rt_rq rt;
	u64 clock;
	u64 clock_task;	/* the same without the time taken by interrupts */
} __co_re;

struct task_struct {
	s32 pid;
	u32 flags;
	int nr_cpus_allowed;
	unsigned short migration_disabled;
	struct sched_entity se;
	const struct cpumask *cpus_ptr;
	struct css_set *cgroups;
	struct sched_ext_entity scx;
	char comm[16];
} __co_re;

struct scx_cpu_release_args {
	int reason;
} __co_re;

struct scx_dump_ctx {
	int kind;
} __co_re;

enum scx_exit_kind { SCX_EXIT_NONE = 0 };

struct scx_exit_info {
	enum scx_exit_kind kind;
	s64 exit_code;
	const char *reason;
	char *msg;
	char *dump;
} __co_re;

struct scx_init_task_args {
	bool fork;
} __co_re;

struct scx_exit_task_args {
	bool cancelled;
} __co_re;

/* A part of the kernel's struct: libbpf copies the members over by name. */
struct sched_ext_ops {
	/* First: the loader writes these. */
	u64 hotplug_seq;
	u64 flags;
	s32 (*select_cpu)(struct task_struct *p, s32 prev_cpu, u64 wake_flags);
	void (*enqueue)(struct task_struct *p, u64 enq_flags);
	void (*dispatch)(s32 cpu, struct task_struct *prev);
	void (*tick)(struct task_struct *p);
	void (*update_idle)(s32 cpu, bool idle);
	void (*set_cpumask)(struct task_struct *p, const struct cpumask *mask);
	void (*cpu_release)(s32 cpu, struct scx_cpu_release_args *args);
	void (*enable)(struct task_struct *p);
	s32 (*init_task)(struct task_struct *p, struct scx_init_task_args *args);
	void (*exit_task)(struct task_struct *p, struct scx_exit_task_args *args);
	void (*dump)(struct scx_dump_ctx *ctx);
	void (*dump_cpu)(struct scx_dump_ctx *ctx, s32 cpu, bool idle);
	void (*dump_task)(struct scx_dump_ctx *ctx, struct task_struct *p);
	s32 (*init)(void);
	void (*exit)(struct scx_exit_info *ei);
	u32 timeout_ms;
	char name[128];
};

struct bpf_iter_scx_dsq {
	u64 __opaque[6];
} __attribute__((aligned(8)));

/* Values of include/linux/sched/ext.h and kernel/sched/ext.c; part of sched_ext's interface. */
#define SCX_OPS_KEEP_BUILTIN_IDLE	1ull
#define SCX_OPS_ENQ_MIGRATION_DISABLED	16ull
#define SCX_WAKE_SYNC	0x10ull
#define SCX_ENQ_WAKEUP	1ull
#define SCX_ENQ_REENQ	(1ull << 40)
#define SCX_KICK_PREEMPT	2ull
#define SCX_TASK_QUEUED	1u
#define SCX_DSQ_LOCAL	(1ull << 63 | 2)
#define SCX_DSQ_LOCAL_ON	(1ull << 63 | 1ull << 62)
#define SCX_PICK_IDLE_CORE	1ull
#define SCX_DSQ_ITER_REV	(1ull << 16)
#define PF_EXITING	0x4u
#define CLOCK_MONOTONIC	1

extern const struct rq runqueues __ksym; /* one per CPU */

extern u64 scx_bpf_now(void) __ksym;
extern s32 scx_bpf_create_dsq(u64 dsq_id, s32 node) __ksym;
extern void scx_bpf_dsq_insert(struct task_struct *p, u64 dsq_id, u64 slice, u64 enq_flags) __ksym;
extern void scx_bpf_dsq_insert_vtime(struct task_struct *p, u64 dsq_id, u64 slice, u64 vtime,
				     u64 enq_flags) __ksym;
extern bool scx_bpf_dsq_move_to_local(u64 dsq_id) __ksym;
extern bool scx_bpf_dsq_move(struct bpf_iter_scx_dsq *it__iter, struct task_struct *p, u64 dsq_id,
			     u64 enq_flags) __ksym;
extern s32 scx_bpf_dsq_nr_queued(u64 dsq_id) __ksym;
extern void scx_bpf_kick_cpu(s32 cpu, u64 flags) __ksym;
extern bool scx_bpf_test_and_clear_cpu_idle(s32 cpu) __ksym;
extern s32 scx_bpf_pick_idle_cpu(const struct cpumask *cpus_allowed, u64 flags) __ksym;
extern s32 scx_bpf_task_cpu(const struct task_struct *p) __ksym;
extern int bpf_iter_scx_dsq_new(struct bpf_iter_scx_dsq *it, u64 dsq_id, u64 flags) __ksym;
extern struct task_struct *bpf_iter_scx_dsq_next(struct bpf_iter_scx_dsq *it) __ksym;
extern void bpf_iter_scx_dsq_destroy(struct bpf_iter_scx_dsq *it) __ksym;
extern bool bpf_cpumask_test_cpu(u32 cpu, const struct cpumask *cpumask) __ksym;
extern void bpf_rcu_read_lock(void) __ksym;
extern void bpf_rcu_read_unlock(void) __ksym;
extern u32 bpf_cpumask_first(const struct cpumask *cpumask) __ksym;
/* Before 7.3 it returns a count, later nothing; libbpf strips the suffix after `___`. */
extern u32 scx_bpf_reenqueue_local___count(void) __ksym __weak;
extern void scx_bpf_reenqueue_local___void(void) __ksym __weak;
extern void scx_bpf_dump_bstr(char *fmt, unsigned long long *data, u32 data__sz) __ksym;

#endif
