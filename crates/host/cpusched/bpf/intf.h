/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * Shared data of the BPF program and its loader. Mirrored in src/intf.rs, whose test
 * compares the sizes with those in the object's type information.
 */
#ifndef SLIP_INTF_H
#define SLIP_INTF_H

#define SLIP_CPUS_MAX	1024
#define SLIP_LLCS_MAX	256
#define SLIP_RULES_MAX	128
#define SLIP_CLASSES_MAX	32
#define SLIP_NO_CLASS	(~0u)
#define SLIP_DUMP_MAX	32768	/* the kernel's default size, see ops.exit_dump_len */

/* The host and the tunables; written before the program is loaded, and never after. */
struct slip_config {
	struct slip_params params;
	u32 nr_llcs;
	u32 nr_cpus;
	u32 nr_rules;
	u32 cgroup_rules;	/* tasks are looked up by cgroup */
	u64 online[SLIP_CPUS_MAX / 64];	/* a task whose mask has all of these may run anywhere */
};

/* A mask of several CPUs that is in use; its index is the domain of the tasks with this mask. */
struct slip_mask {
	u64 hash;		/* of its online CPUs; 0: never used */
	u32 tasks;		/* tasks with this mask; at 0 another mask may take its place */
	u32 pad;
};

/* A CPU, and the state of the queue of the tasks bound to it; one cache line. */
struct slip_cpu_state {
	struct slip_cpu cpu;
	struct slip_domain own;	/* the domain of those tasks */
	u32 bound_put;		/* tasks inserted there so far ... */
	u32 bound_empty_at;	/* ... and that count when it was last found empty */
	u32 seen_put;		/* its LLC's `put` when this CPU last looked for work */
	u32 pull_hint;		/* 1 + the LLC to pull a task from, set by the kicking CPU; 0 none */
	u32 real_time_since;	/* when a real-time task took it, ms; 0: none has it */
	u32 pad;
};

/* An LLC, its queue, its domains, its CPUs by bit, and how their hardware threads pair. */
struct slip_llc_state {
	struct slip_llc llc;
	u32 put;		/* tasks inserted into the queue, or about to be */
	u32 pad;
	struct slip_domain domains[SLIP_DOMAINS];
	u64 pair_first;		/* bits whose next bit is their only sibling */
	u64 single;		/* bits of CPUs without a sibling */
	u32 cpu_of_bit[64];
	u64 rescued_at;		/* when idle CPUs were last searched for tasks of the queue, ns */
};

/* A thread name to compare with, as two words and their significant bits. */
struct slip_rule {
	u64 name[2];
	u64 mask[2];
	u32 class;
	u32 pad;
};

struct slip_class {
	u64 llc_mask;		/* 0: all */
	u64 slice_cap_ns;	/* 0: none */
	u32 weight;		/* 0: that of the nice value */
	u32 no_hand_off;
};

/* Why the scheduler ended. */
struct slip_exit {
	u64 code;
	u32 kind;
	u32 pad;
	char reason[64];
	char message[256];
	char dump[SLIP_DUMP_MAX];	/* the kernel's dump of CPUs, tasks and queues */
};

#endif
