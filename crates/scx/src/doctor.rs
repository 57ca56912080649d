//! Whether our `sched_ext` scheduler can run on this host, and what to do if not.

use std::path::Path;

use serde::Serialize;

use crate::btf::{Btf, Params};
use crate::topology::Topology;

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As needed.
    Ok,
    /// Works, but something should be known.
    Note,
    /// Our scheduler cannot run.
    Missing,
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at.
    pub what: &'static str,
    /// How it went.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to do; empty when nothing is to be done.
    pub remedy: String,
}

/// Where to look; the defaults are those of a running system, tests have their own.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    /// `/sys`
    pub sysfs: &'a Path,
    /// `/proc`
    pub procfs: &'a Path,
}

/// The kernel functions that the BPF program calls, with their parameters. A kernel whose own
/// differ refuses the program.
pub const KFUNCS: &[(&str, usize)] = &[
    ("scx_bpf_now", 0),
    ("scx_bpf_create_dsq", 2),
    ("scx_bpf_dsq_insert", 4),
    ("scx_bpf_dsq_insert_vtime", 5),
    ("scx_bpf_dsq_move_to_local", 1),
    ("scx_bpf_dsq_nr_queued", 1),
    ("scx_bpf_kick_cpu", 2),
    ("scx_bpf_test_and_clear_cpu_idle", 1),
    ("scx_bpf_pick_idle_cpu", 2),
    ("scx_bpf_task_cpu", 1),
    ("bpf_iter_scx_dsq_new", 3),
    ("bpf_iter_scx_dsq_next", 1),
    ("bpf_iter_scx_dsq_destroy", 1),
];

const CAPABILITIES: [(&str, u32); 3] =
    [("CAP_BPF", 39), ("CAP_PERFMON", 38), ("CAP_SYS_ADMIN", 21)];

/// Looks at everything. Never fails: what cannot be read is a finding.
pub fn examine(places: Places) -> Vec<Check> {
    let mut checks = vec![kernel(places), state(places)];
    checks.extend(types(places));
    checks.push(capabilities(places));
    checks.push(topology(places));
    checks
}

/// Whether our scheduler can run, by these checks.
pub fn can_run(checks: &[Check]) -> bool {
    checks.iter().all(|c| c.verdict != Verdict::Missing)
}

fn check(what: &'static str, verdict: Verdict, found: impl Into<String>, remedy: &str) -> Check {
    Check {
        what,
        verdict,
        found: found.into(),
        remedy: remedy.to_owned(),
    }
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path)
        .ok()
        .map(|s| s.trim().to_owned())
}

fn kernel(places: Places) -> Check {
    match read(&places.procfs.join("sys/kernel/osrelease")) {
        Some(release) => check("kernel", Verdict::Ok, release, ""),
        None => check("kernel", Verdict::Note, "unknown release", "mount /proc"),
    }
}

fn state(places: Places) -> Check {
    const WHAT: &str = "sched_ext";
    let dir = places.sysfs.join("kernel/sched_ext");
    let Some(state) = read(&dir.join("state")) else {
        return check(
            WHAT,
            Verdict::Missing,
            "the kernel was built without sched_ext",
            "boot a kernel 6.14 or later with CONFIG_SCHED_CLASS_EXT=y (Debian: 6.18 from \
             trixie-backports); until then, pin threads and set cgroup weights, which the \
             kernel's own scheduler honors",
        );
    };
    if state == "disabled" {
        return check(WHAT, Verdict::Ok, "present, no scheduler attached", "");
    }
    let name = read(&dir.join("root/ops")).unwrap_or_else(|| "of unknown name".into());
    if name.starts_with("slipstream") {
        return check(
            WHAT,
            Verdict::Note,
            format!("`{name}` is attached: ours"),
            "",
        );
    }
    check(
        WHAT,
        Verdict::Missing,
        format!("scheduler `{name}` is attached ({state})"),
        "stop its process (the kernel goes back to its own scheduler), then start ours",
    )
}

fn types(places: Places) -> Vec<Check> {
    const WHAT: &str = "kernel types";
    let path = places.sysfs.join("kernel/btf/vmlinux");
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) => {
            return vec![check(
                WHAT,
                Verdict::Missing,
                format!("{}: {e}", path.display()),
                "boot a kernel with CONFIG_DEBUG_INFO_BTF=y",
            )];
        }
    };
    let mut wanted = vec!["sched_ext_ops"];
    wanted.extend(KFUNCS.iter().map(|k| k.0));
    let btf = match Btf::parse(&bytes, &wanted) {
        Ok(btf) => btf,
        Err(e) => {
            return vec![check(
                WHAT,
                Verdict::Missing,
                format!("{}: {e}", path.display()),
                "boot a kernel whose BTF this program can read",
            )];
        }
    };
    let ops = match btf.members("sched_ext_ops") {
        Some(members) => check(
            WHAT,
            Verdict::Ok,
            format!("sched_ext_ops has {} members", members.len()),
            "",
        ),
        None => {
            return vec![check(
                WHAT,
                Verdict::Missing,
                "no struct sched_ext_ops",
                "boot a kernel with CONFIG_SCHED_CLASS_EXT=y",
            )];
        }
    };
    vec![ops, kfuncs(&btf)]
}

fn kfuncs(btf: &Btf) -> Check {
    const WHAT: &str = "kernel functions";
    let hidden = |p: &Params| {
        p.last()
            .is_some_and(|(_, s)| s.as_deref() == Some("bpf_prog_aux"))
    };
    let (mut absent, mut leaking, mut other) = (Vec::new(), Vec::new(), Vec::new());
    for &(name, count) in KFUNCS {
        match btf.params(name) {
            None => absent.push(name),
            Some(p) if p.len() == count => {}
            Some(p) if p.len() == count + 1 && hidden(p) => leaking.push(name),
            Some(p) => other.push(format!("{name} takes {} arguments, not {count}", p.len())),
        }
    }
    if !leaking.is_empty() {
        return check(
            WHAT,
            Verdict::Missing,
            format!("the BTF shows a hidden argument of {}", leaking.join(", ")),
            "this kernel's BTF is broken (Debian 7.2.12 is) and no sched_ext program loads on it; \
             boot another, such as 6.18",
        );
    }
    if !absent.is_empty() {
        return check(
            WHAT,
            Verdict::Missing,
            format!("not there: {}", absent.join(", ")),
            "boot a kernel 6.14 or later, where they have these names",
        );
    }
    if !other.is_empty() {
        return check(
            WHAT,
            Verdict::Missing,
            other.join("; "),
            "this kernel's interface is another than ours; use a kernel up to 6.18, or a later \
             version of this program",
        );
    }
    check(
        WHAT,
        Verdict::Ok,
        format!("all {} as expected", KFUNCS.len()),
        "",
    )
}

fn capabilities(places: Places) -> Check {
    const WHAT: &str = "privileges";
    let status = read(&places.procfs.join("self/status")).unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|l| l.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    let Some(effective) = effective else {
        return check(
            WHAT,
            Verdict::Note,
            "unknown: /proc/self/status has no CapEff",
            "mount /proc",
        );
    };
    let lacking: Vec<&str> = CAPABILITIES
        .iter()
        .filter(|(_, bit)| effective >> bit & 1 == 0)
        .map(|(n, _)| *n)
        .collect();
    if lacking.is_empty() {
        return check(WHAT, Verdict::Ok, "CAP_BPF, CAP_PERFMON, CAP_SYS_ADMIN", "");
    }
    check(
        WHAT,
        Verdict::Missing,
        format!("without {}", lacking.join(", ")),
        "run `slipstream sched run` as root",
    )
}

fn topology(places: Places) -> Check {
    const WHAT: &str = "topology";
    match Topology::read(places.sysfs) {
        Ok(t) => {
            let found = format!("{} CPUs in {} LLCs", t.cpus.len(), t.llcs.len());
            check(WHAT, Verdict::Ok, found, "")
        }
        Err(e) => check(WHAT, Verdict::Missing, e.to_string(), "mount sysfs on /sys"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::btf::tests::Writer;

    struct Host(tempfile::TempDir);

    impl Host {
        /// A host on which our scheduler can run.
        fn good() -> Host {
            let host = Host(tempfile::tempdir().unwrap());
            host.write("sys/kernel/sched_ext/state", b"disabled\n");
            host.write("sys/devices/system/cpu/online", b"0-1\n");
            host.write("proc/sys/kernel/osrelease", b"6.18.15\n");
            host.write("proc/self/status", b"Name:\tx\nCapEff:\t000001ffffffffff\n");
            host.btf("sched_ext_ops", 0, KFUNCS.len());
            host
        }

        fn write(&self, path: &str, bytes: &[u8]) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }

        /// BTF with the first `kfuncs` functions, each with `hidden` arguments too many.
        fn btf(&self, ops: &str, hidden: usize, kfuncs: usize) {
            let mut w = Writer::new();
            w.strukt(ops, &["select_cpu", "enqueue"]);
            let aux = w.strukt("bpf_prog_aux", &["id"]);
            let aux = w.pointer(aux);
            for &(name, count) in &KFUNCS[..kfuncs] {
                let mut params = vec![("x", 0); count];
                params.extend(vec![("aux", aux); hidden]);
                w.function(name, &params);
            }
            self.write("sys/kernel/btf/vmlinux", &w.finish());
        }

        fn check(&self, what: &str, verdict: Verdict, part: &str) {
            let (sysfs, procfs) = (self.0.path().join("sys"), self.0.path().join("proc"));
            let checks = examine(Places {
                sysfs: &sysfs,
                procfs: &procfs,
            });
            let c = checks.iter().find(|c| c.what == what).unwrap();
            assert_eq!(c.verdict, verdict, "{c:?}");
            assert!(c.found.contains(part), "{c:?}");
            assert_eq!(can_run(&checks), verdict != Verdict::Missing);
            assert_eq!(c.remedy.is_empty(), verdict != Verdict::Missing, "{c:?}");
        }
    }

    #[test]
    fn good_host_passes() {
        Host::good().check("kernel functions", Verdict::Ok, "as expected");
        Host::good().check("sched_ext", Verdict::Ok, "no scheduler attached");
    }

    #[test]
    fn every_lack_is_named() {
        let h = Host::good();
        std::fs::remove_dir_all(h.0.path().join("sys/kernel/sched_ext")).unwrap();
        h.check("sched_ext", Verdict::Missing, "without sched_ext");

        let h = Host::good();
        h.write("sys/kernel/sched_ext/state", b"enabled\n");
        h.write("sys/kernel/sched_ext/root/ops", b"p2dq_1.1\n");
        h.check("sched_ext", Verdict::Missing, "`p2dq_1.1` is attached");
        h.write("sys/kernel/sched_ext/root/ops", b"slipstream\n");
        h.check("sched_ext", Verdict::Note, "ours");

        let h = Host::good();
        h.btf("other_ops", 0, KFUNCS.len());
        h.check("kernel types", Verdict::Missing, "no struct sched_ext_ops");
        h.btf("sched_ext_ops", 1, KFUNCS.len());
        h.check(
            "kernel functions",
            Verdict::Missing,
            "hidden argument of scx_bpf_now",
        );
        h.btf("sched_ext_ops", 0, 4);
        h.check(
            "kernel functions",
            Verdict::Missing,
            "not there: scx_bpf_dsq_move_to_local",
        );
        h.write("sys/kernel/btf/vmlinux", b"junk");
        h.check("kernel types", Verdict::Missing, "not BTF");
        std::fs::remove_file(h.0.path().join("sys/kernel/btf/vmlinux")).unwrap();
        h.check("kernel types", Verdict::Missing, "No such file");

        let h = Host::good();
        h.write("proc/self/status", b"CapEff:\t0000000000000000\n");
        h.check(
            "privileges",
            Verdict::Missing,
            "without CAP_BPF, CAP_PERFMON, CAP_SYS_ADMIN",
        );
        std::fs::remove_file(h.0.path().join("sys/devices/system/cpu/online")).unwrap();
    }
}
