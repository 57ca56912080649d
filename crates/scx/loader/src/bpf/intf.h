/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * What the BPF program and its loader say to each other. Mirrored in src/intf.rs, whose test
 * compares the sizes with those in the object's type information.
 */
#ifndef SLIP_INTF_H
#define SLIP_INTF_H

#define SLIP_CPUS_MAX	1024
#define SLIP_LLCS_MAX	256
#define SLIP_RULES_MAX	128
#define SLIP_CLASSES_MAX	32
#define SLIP_NO_CLASS	(~0u)
#define SLIP_DUMP_MAX	32768	/* as long as the kernel's, unless ops.exit_dump_len says otherwise */

/* The host and the tunables; written before the program is loaded, and never after. */
struct slip_config {
	struct slip_params params;
	u32 nr_llcs;
	u32 nr_cpus;
	u32 nr_rules;
	u32 cgroup_rules;	/* tasks are looked up by cgroup */
	u64 online[SLIP_CPUS_MAX / 64];	/* a task whose mask has all of these may run anywhere */
};

/* A mask of several CPUs that tasks have; its index is the domain of those tasks. */
struct slip_mask {
	u64 hash;		/* of its CPUs that are online; 0: never used */
	u32 tasks;		/* that have it; at 0 another mask may take its place */
	u32 pad;
};

/* A CPU, and what is known of the queue of the tasks of that CPU alone; one cache line. */
struct slip_cpu_state {
	struct slip_cpu cpu;
	struct slip_domain own;	/* the domain of those tasks */
	u32 bound_put;		/* tasks ever put there ... */
	u32 bound_empty_at;	/* ... and that count when it was last found empty */
	u32 seen_put;		/* its LLC's `put` when this CPU last looked for work */
	u32 pull_hint;		/* 1 + the LLC that it was woken to take a task from */
	u32 real_time_since;	/* when a real-time task took it, ms; 0: none has it */
	u32 pad;
};

/* An LLC, its queue, its domains, its CPUs by bit, and how their hardware threads pair. */
struct slip_llc_state {
	struct slip_llc llc;
	u32 put;		/* tasks that were put into the queue, or are about to be */
	u32 pad;
	struct slip_domain domains[SLIP_DOMAINS];
	u64 pair_first;		/* bits whose next bit is their only sibling */
	u64 single;		/* bits of CPUs without a sibling */
	u32 cpu_of_bit[64];
};

/* A thread name to compare with, as two words and what of them counts. */
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

/* Why the scheduler was ended. */
struct slip_exit {
	u64 code;
	u32 kind;
	u32 pad;
	char reason[64];
	char message[256];
	char dump[SLIP_DUMP_MAX];	/* the kernel's, of CPUs, tasks and queues */
};

#endif
