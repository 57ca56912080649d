/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* Operations of the scheduler are plain functions here. */
#define BPF_PROG(name, args...) name(args)
