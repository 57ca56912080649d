/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* The simulated kernel's structs are the program's declarations: no offsets to relocate. */
#define SLIP_READ_2(a, b)	   ((a)->b)
#define SLIP_READ_3(a, b, c)	   ((a)->b->c)
#define SLIP_READ_4(a, b, c, d)	   ((a)->b->c->d)
#define SLIP_READ_5(a, b, c, d, e) ((a)->b->c->d->e)
#define SLIP_READ_N(a, b, c, d, e, n, ...) SLIP_READ_##n
#define BPF_CORE_READ(args...) SLIP_READ_N(args, 5, 4, 3, 2)(args)
#define bpf_core_field_exists(field) 1
#define bpf_core_type_exists(type)   1
#define bpf_ksym_exists(symbol)	     1
