/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Types that libbpf's headers and ours require. Replaces <linux/bpf.h>, whose version is that of the
 * build system. */
#ifndef SLIP_TYPES_H
#define SLIP_TYPES_H

#include <stdbool.h>

typedef unsigned char __u8;
typedef signed short __s16;
typedef unsigned short __u16;
typedef signed int __s32;
typedef unsigned int __u32;
typedef signed long long __s64;
typedef unsigned long long __u64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef __u8 u8;
typedef __u32 u32;
typedef __s32 s32;
typedef __u64 u64;
typedef __s64 s64;

#ifndef NULL
#define NULL ((void *)0)
#endif

/* From the kernel's BPF interface, include/uapi/linux/bpf.h. */
enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_MAP_TYPE_TASK_STORAGE = 29,
};
#define BPF_F_NO_PREALLOC	1u
#define BPF_LOCAL_STORAGE_GET_F_CREATE	1ull
#define BPF_RB_FORCE_WAKEUP	2ull

/* The kernel finds it in a map's value by its name and size. */
struct bpf_timer {
	__u64 __opaque[2];
} __attribute__((aligned(8)));

struct bpf_iter_num {
	__u64 __opaque[1];
} __attribute__((aligned(8)));

#endif
