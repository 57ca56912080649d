/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * The simulated kernel of ../../program.c: replaces libbpf's header of this name for the BPF
 * program. Only the functions that the program uses.
 */
#ifndef SLIP_HOST_BPF_HELPERS_H
#define SLIP_HOST_BPF_HELPERS_H

#define SEC(name)
#define __ksym
#define __weak
#define __uint(name, val)	int (*name)[val]
#define __type(name, val)	__typeof__(val) *name
#ifndef __always_inline
#define __always_inline		inline __attribute__((always_inline, unused))
/* For the macros that print: nothing is printed. */
#define ___bpf_narg(args...)			  8
#define ___bpf_fill(words, args...)		  ((void)(words))

#endif
#define barrier_var(var)	((void)0)

/* A plain loop: only the verifier needs the kernel's iterator. */
#define bpf_for(i, start, end)	for ((i) = (start); (i) < (end); (i)++)
#define bpf_repeat(n)		for (int slip_i_ = 0; slip_i_ < (int)(n); slip_i_++)

struct task_struct;
extern u32 slip_host_cpu;	/* the CPU that runs the program */
struct rq *slip_host_rq(u32 cpu);
void *slip_host_lookup(void *map, u32 type, u32 entries, u32 key_size, u32 value_size, void *key);
void *slip_host_storage(void *map, u32 value_size, struct task_struct *p, u64 flags);
struct task_struct *slip_host_current(void);
void slip_host_copy(void *to, void *from, u32 size);
long slip_host_copy_str(void *to, u32 size, void *from);
long slip_host_timer(void *timer, void *map, void *callback, u64 ns);

#define bpf_map_lookup_elem(m, k)                                                            \
	slip_host_lookup((m), sizeof(*(m)->type) / sizeof(int),                              \
			 sizeof(*(m)->max_entries) / sizeof(int), sizeof(*(m)->key),         \
			 sizeof(*(m)->value), (void *)(k))
#define bpf_task_storage_get(m, p, v, flags)                                                 \
	slip_host_storage((m), sizeof(*(m)->value), (p), (flags))
#define bpf_probe_read_kernel(to, size, from)	  (slip_host_copy((to), (void *)(from), (size)), 0L)
#define bpf_probe_read_kernel_str(to, size, from) slip_host_copy_str((to), (size), (void *)(from))
#define bpf_get_smp_processor_id()		  slip_host_cpu
#define bpf_get_current_task_btf()		  slip_host_current()
#define bpf_this_cpu_ptr(var)			  slip_host_rq(slip_host_cpu)
#define bpf_per_cpu_ptr(var, cpu)		  slip_host_rq(cpu)
#define bpf_ringbuf_output(m, data, size, flags)  0L
#define bpf_ktime_get_ns()			  scx_bpf_now()
#define bpf_timer_init(timer, m, flags)		  slip_host_timer((timer), (m), NULL, 0)
#define bpf_timer_set_callback(timer, callback)	  slip_host_timer((timer), NULL, (callback), 0)
#define bpf_timer_start(timer, ns, flags)	  slip_host_timer((timer), NULL, NULL, (ns))

/* For the macros that print: nothing is printed. */
#define ___bpf_narg(args...)			  8
#define ___bpf_fill(words, args...)		  ((void)(words))

#endif
