//! Values for the BPF program's maps: the bytes of the structs in `cpusched`'s `bpf/intf.h`.
//!
//! Written field by field; libbpf rejects a value whose size differs from the map's.

use slipstream_base::width::to_u32;
use slipstream_cpusched::policy::{DOMAINS, Params};
use slipstream_scx::classes::{Class, Rule, Subject};
use slipstream_scx::topology::Topology;

/// `SLIP_CPUS_MAX`.
pub const CPUS_MAX: u32 = 1024;
/// `SLIP_LLCS_MAX`.
pub const LLCS_MAX: usize = 256;

/// A struct's bytes under construction. All structs are laid out without gaps.
#[derive(Default)]
pub struct Bytes(Vec<u8>);

impl Bytes {
    fn u32(mut self, v: u32) -> Bytes {
        self.0.extend(v.to_ne_bytes());
        self
    }

    fn u64(mut self, v: u64) -> Bytes {
        self.0.extend(v.to_ne_bytes());
        self
    }
}

/// `struct slip_params`.
pub fn params(p: &Params) -> Vec<u8> {
    Bytes::default()
        .u64(p.slice_ns[0])
        .u64(p.slice_ns[1])
        .u64(p.slice_ns[2])
        .u64(p.slice_min_ns)
        .u64(p.slice_max_ns)
        .u64(p.wake_idle_ns)
        .u64(p.patience_ns)
        .u32(p.residency_runs)
        .u32(p.slack_pct)
        .u32(p.saturated_pct)
        .u32(p.relaxed_pct)
        .u32(p.hand_off)
        .u32(p.learn)
        .u32(p.preempt)
        .u32(p.saturated_runs)
        .u32(p.trust_after)
        .u32(p.llcs_per_node)
        .0
}

/// `struct slip_config`.
pub fn config(p: &Params, t: &Topology, rules: usize, cgroup_rules: bool) -> Vec<u8> {
    let mut online = [0u64; CPUS_MAX as usize / 64];
    for &cpu in t.cpus.keys() {
        online[cpu as usize / 64] |= 1 << (cpu % 64);
    }
    let b = Bytes(params(p))
        .u32(to_u32(t.llcs.len()))
        .u32(to_u32(t.cpus.len()))
        .u32(to_u32(rules))
        .u32(u32::from(cgroup_rules));
    online.iter().fold(b, |b, &word| b.u64(word)).0
}

/// All of `struct slip_cpu_state`; an absent CPU has no LLC.
pub fn cpus(t: &Topology) -> Vec<u8> {
    let mut places = vec![(u32::MAX, 0); CPUS_MAX as usize];
    for llc in 0..t.llcs.len() {
        for (bit, id) in order(t, llc).into_iter().enumerate() {
            places[id as usize] = (to_u32(llc), to_u32(bit));
        }
    }
    let one = |b: Bytes, (llc, bit): &(u32, u32)| {
        // The handoff's time, place, level; then the own domain, the counts and real-time tasks' times.
        let b = b.u64(0).u32(*llc).u32(*bit).u64(0);
        (0..5).fold(b, |b, _| b.u64(0))
    };
    places.iter().fold(Bytes::default(), one).0
}

/// All of `struct slip_llc_state`; every CPU counts as busy until the kernel reports it idle.
pub fn llcs(t: &Topology) -> Vec<u8> {
    let one = |b: Bytes, i: usize| {
        let nr_cpus = to_u32(t.llcs.get(i).map_or(0, Vec::len));
        let mut b = (0..5).fold(b, |b, _| b.u64(0));
        b = b.u32(nr_cpus).u32(0).u32(1).u32(0);
        // The count of its queue, and the domains' clocks and offsets.
        b = (0..=2 * DOMAINS).fold(b, |b, _| b.u64(0));
        b.0.extend(if nr_cpus > 0 {
            cores(t, i)
        } else {
            vec![0; 272]
        });
        // The last search for idle CPUs.
        b.u64(0)
    };
    (0..LLCS_MAX).fold(Bytes::default(), one).0
}

/// The CPUs of an LLC by bit: hardware threads of a core are adjacent.
pub fn order(t: &Topology, llc: usize) -> Vec<u32> {
    let mut cpus = t.llcs[llc].clone();
    cpus.sort_by_key(|id| (t.cpus[id].core, *id));
    cpus
}

/// Of `struct slip_llc_state`: the pairs of hardware threads, and the CPU of each bit.
fn cores(t: &Topology, llc: usize) -> Vec<u8> {
    let cpus = order(t, llc);
    let core = |bit: usize| cpus.get(bit).map(|id| t.cpus[id].core);
    let (mut pair_first, mut single) = (0u64, 0u64);
    for bit in 0..cpus.len() {
        let siblings = (0..cpus.len()).filter(|&b| core(b) == core(bit)).count();
        if siblings == 1 {
            single |= 1 << bit;
        } else if siblings == 2 && core(bit + 1) == core(bit) {
            pair_first |= 1 << bit;
        }
    }
    let mut b = Bytes::default().u64(pair_first).u64(single);
    for bit in 0..64 {
        b = b.u32(cpus.get(bit).copied().unwrap_or(u32::MAX));
    }
    b.0
}

/// `struct slip_rule`; `None` for a rule on cgroups, which the loader resolves itself.
pub fn rule(r: &Rule) -> Option<Vec<u8>> {
    if r.subject != Subject::Comm {
        return None;
    }
    let (mut name, mut mask) = ([0u8; 16], [0u8; 16]);
    let text = r.text.as_bytes();
    let length = text.len().min(15);
    name[..length].copy_from_slice(&text[..length]);
    // An exact name includes its terminating zero.
    let counted = if r.is_prefix { length } else { length + 1 };
    mask[..counted].fill(0xff);
    let mut b = Bytes::default();
    b.0.extend(name);
    b.0.extend(mask);
    Some(b.u32(to_u32(r.class)).u32(0).0)
}

/// `struct slip_class`.
pub fn class(c: &Class) -> Vec<u8> {
    Bytes::default()
        .u64(c.llc_mask)
        .u64(c.slice_us.map_or(0, |us| u64::from(us) * 1_000))
        .u32(c.weight.unwrap_or(0))
        .u32(u32::from(!c.hand_off))
        .0
}

/// `SCX_ECODE_RSN_HOTPLUG` and `SCX_ECODE_ACT_RESTART` of `include/linux/sched/ext.h`.
const HOTPLUG: u64 = 1 << 32;
const RESTART: u64 = 1 << 48;
/// `SCX_EXIT_SYSRQ`: SysRq-S, the operator's way back to the kernel's scheduler.
const SYSRQ: u32 = 67;

/// `struct slip_exit`: why the kernel ended the scheduler.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exit {
    /// `enum scx_exit_kind`; 0 while the scheduler runs.
    pub kind: u32,
    /// The kernel's exit code.
    pub code: u64,
    /// The cause, such as `runnable task stall`.
    pub reason: String,
    /// The task, and the duration.
    pub message: String,
    /// The kernel's dump of CPUs, tasks and queues; may be cut off.
    pub dump: String,
}

impl Exit {
    /// Parses the map's value.
    pub fn parse(bytes: &[u8]) -> Option<Exit> {
        let text = |b: &[u8]| {
            let end = b.iter().position(|&c| c == 0).unwrap_or(b.len());
            String::from_utf8_lossy(&b[..end]).into_owned()
        };
        Some(Exit {
            code: u64::from_ne_bytes(bytes.get(..8)?.try_into().ok()?),
            kind: u32::from_ne_bytes(bytes.get(8..12)?.try_into().ok()?),
            reason: text(bytes.get(16..80)?),
            message: text(bytes.get(80..336)?),
            dump: text(bytes.get(336..)?),
        })
    }

    /// Whether a CPU came online or went offline: the topology must be read and the scheduler loaded again.
    pub fn is_hotplug(&self) -> bool {
        self.code & (HOTPLUG | RESTART) != 0
    }

    /// Whether the operator requested the kernel's own scheduler.
    pub fn is_requested(&self) -> bool {
        self.kind == SYSRQ
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_scx::topology::Cpu;

    #[test]
    fn cores_are_paired_whatever_the_numbering() {
        // Siblings are n and n + 4, as on many Intel hosts; CPU 8 has none.
        let cpu = |id| {
            (
                id,
                Cpu {
                    id,
                    core: if id == 8 { 8 } else { id % 4 },
                    llc: 0,
                    node: 0,
                },
            )
        };
        let t = Topology {
            cpus: (0..9).map(cpu).collect(),
            llcs: vec![(0..9).collect()],
        };
        assert_eq!(order(&t, 0), [0, 4, 1, 5, 2, 6, 3, 7, 8]);
        let info = cores(&t, 0);
        assert_eq!(info[..8], 0b0101_0101u64.to_ne_bytes());
        assert_eq!(info[8..16], 0b1_0000_0000u64.to_ne_bytes());
    }

    #[test]
    fn rules_compare_names_and_prefixes() {
        let rule = |text: &str, is_prefix| {
            let r = Rule {
                subject: Subject::Comm,
                text: text.into(),
                is_prefix,
                class: 3,
            };
            super::rule(&r).unwrap()
        };
        let matches = |r: &[u8], comm: &str| {
            let mut name = [0u8; 16];
            name[..comm.len()].copy_from_slice(comm.as_bytes());
            (0..16).all(|i| name[i] & r[16 + i] == r[i])
        };
        assert!(
            matches(&rule("vllm", true), "vllm:engine") && matches(&rule("vllm", true), "vllm")
        );
        assert!(matches(&rule("vllm", false), "vllm") && !matches(&rule("vllm", false), "vllm2"));
        assert!(matches(&rule("fifteen_letters", false), "fifteen_letters"));
        assert!(!matches(&rule("vllm", true), "vlln"));
    }

    #[test]
    fn exit_is_read_with_and_without_a_dump() {
        let mut bytes = vec![0u8; 336];
        bytes[..8].copy_from_slice(&7u64.to_ne_bytes());
        bytes[8..12].copy_from_slice(&1026u32.to_ne_bytes());
        bytes[16..35].copy_from_slice(b"runnable task stall");
        bytes[80..85].copy_from_slice(b"sx[1]");
        let exit = Exit::parse(&bytes).unwrap();
        assert_eq!((exit.kind, exit.code), (1026, 7));
        assert_eq!(
            (exit.reason.as_str(), exit.message.as_str()),
            ("runnable task stall", "sx[1]")
        );
        assert!(exit.dump.is_empty() && !exit.is_hotplug() && !exit.is_requested());
        bytes.extend(b"CPU 0: nr_run=1\nR sx[1]\n\0rest");
        let exit = Exit::parse(&bytes).unwrap();
        assert_eq!(exit.dump, "CPU 0: nr_run=1\nR sx[1]\n");
        bytes[..8].copy_from_slice(&HOTPLUG.to_ne_bytes());
        assert!(Exit::parse(&bytes).unwrap().is_hotplug());
        assert_eq!(Exit::parse(&bytes[..335]), None);
    }
}
