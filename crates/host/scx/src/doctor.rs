//! Checks whether our `sched_ext` scheduler can run on this host, which guarantees it would break, and the remedies.

use std::path::Path;
use std::sync::LazyLock;

pub use slipstream_os::checks::{Check, Verdict, breaks, can_run};

use crate::btf::{Btf, Params};
use crate::cgroups::{self, Honors, InUse, Setting};
use crate::topology::{Topology, parse_cpu_list};

/// Mount points to read; the defaults are those of a running system, tests have their own.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    /// `/sys`
    pub sysfs: &'a Path,
    /// `/proc`
    pub procfs: &'a Path,
}

/// A kernel function that the BPF program calls. A kernel whose function has other parameters rejects the
/// program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Import {
    /// Its name, without the suffix that libbpf strips (`___variant`).
    pub name: String,
    /// Number of parameters.
    pub params: usize,
    /// Whether the program loads without it (`__weak`).
    pub is_weak: bool,
}

/// The kernel functions declared in the header that the BPF program is compiled with. The loader
/// checks the imports of the compiled program instead.
pub fn declared_imports() -> &'static [Import] {
    static IMPORTS: LazyLock<Vec<Import>> =
        LazyLock::new(|| imports_of(include_str!("../../cpusched/bpf/kernel.h")));
    &IMPORTS
}

/// A function's name without `___variant`. Of several declarations of one function, libbpf uses
/// the one that fits the kernel.
pub fn plain_name(name: &str) -> &str {
    name.split_once("___").map_or(name, |(plain, _)| plain)
}

/// The `extern ... __ksym` functions of a C header.
fn imports_of(header: &str) -> Vec<Import> {
    let mut code = String::new();
    let mut rest = header;
    while let Some((before, after)) = rest.split_once("/*") {
        code.push_str(before);
        rest = after.split_once("*/").map_or("", |(_, after)| after);
    }
    code.push_str(rest);
    let declaration = |text: &str| {
        // A declaration is the text after the last preprocessor line.
        let text = text.rsplit_once("extern ")?.1;
        let (head, rest) = text.split_once('(')?;
        let (params, attributes) = rest.rsplit_once(')')?;
        if !attributes.contains("__ksym") {
            return None;
        }
        let name = head
            .rsplit(|c: char| !c.is_alphanumeric() && c != '_')
            .next()?;
        Some(Import {
            name: plain_name(name).to_owned(),
            params: match params.trim() {
                "" | "void" => 0,
                list => list.split(',').count(),
            },
            is_weak: attributes.contains("__weak"),
        })
    };
    code.split(';').filter_map(declaration).collect()
}

const CAPABILITIES: [(&str, u32); 3] =
    [("CAP_BPF", 39), ("CAP_PERFMON", 38), ("CAP_SYS_ADMIN", 21)];

/// Runs all checks. Never fails: an unreadable file is reported as a check.
pub fn examine(places: Places) -> Vec<Check> {
    examine_with(places, declared_imports(), Honors::ours())
}

/// [`examine`] for a program that imports these functions and enforces these settings.
pub fn examine_with(places: Places, imports: &[Import], honors: Honors) -> Vec<Check> {
    let mut checks = vec![kernel(places), state(places)];
    checks.extend(types(places, imports));
    checks.push(isolated(places));
    checks.push(capabilities(places));
    checks.push(topology(places));
    checks.push(offline(places));
    checks.push(smt(places));
    checks.extend(cgroup_settings(places, honors));
    checks.push(real_time(places));
    checks
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
        "stop its process (the kernel returns to its own scheduler), then start ours",
    )
}

fn types(places: Places, imports: &[Import]) -> Vec<Check> {
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
    wanted.extend(imports.iter().map(|i| i.name.as_str()));
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
    vec![ops, kfuncs(&btf, imports)]
}

fn kfuncs(btf: &Btf, imports: &[Import]) -> Check {
    const WHAT: &str = "kernel functions";
    let hidden = |p: &Params| {
        p.last()
            .is_some_and(|(_, s)| s.as_deref() == Some("bpf_prog_aux"))
    };
    let (mut absent, mut leaking, mut other) = (Vec::new(), Vec::new(), Vec::new());
    for import in imports {
        let (name, count) = (import.name.as_str(), import.params);
        match btf.params(name) {
            None if import.is_weak => {}
            // Another variant may fit; a program must work without one that does not.
            Some(p) if import.is_weak && p.len() != count => {}
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
            "this kernel's interface differs from ours; use a kernel up to 6.18, or a later \
             version of this program",
        );
    }
    check(
        WHAT,
        Verdict::Ok,
        format!("all {} as expected", imports.len()),
        "",
    )
}

/// `scx_ops_enable()` in kernel/sched/ext.c fails with EINVAL unless `housekeeping_cpumask(HK_TYPE_DOMAIN)` has all CPUs.
fn isolated(places: Places) -> Check {
    const WHAT: &str = "isolated CPUs";
    match read(&places.sysfs.join("devices/system/cpu/isolated")) {
        Some(cpus) if !cpus.is_empty() => check(
            WHAT,
            Verdict::Missing,
            format!(
                "CPUs {cpus} are isolated, and the kernel loads no sched_ext scheduler on such a host"
            ),
            "boot without `isolcpus=` (its flags `nohz` and `managed_irq` alone isolate no CPU), and pin threads by \
             cpuset.cpus instead",
        ),
        _ => check(WHAT, Verdict::Ok, "none", ""),
    }
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

/// CPUs in the kernel's list form.
fn cpu_list(places: Places, name: &str) -> Option<Vec<u32>> {
    let path = places.sysfs.join("devices/system/cpu").join(name);
    parse_cpu_list(&read(&path)?, name).ok()
}

fn offline(places: Places) -> Check {
    const WHAT: &str = "CPUs";
    let (Some(possible), Some(online)) = (cpu_list(places, "possible"), cpu_list(places, "online"))
    else {
        return check(WHAT, Verdict::Note, "unknown", "mount sysfs on /sys");
    };
    let missing = possible.iter().filter(|c| !online.contains(c)).count();
    if missing == 0 {
        return check(
            WHAT,
            Verdict::Ok,
            format!("all {} possible CPUs are online", possible.len()),
            "",
        );
    }
    check(
        WHAT,
        Verdict::Note,
        format!("{missing} of {} possible CPUs are offline", possible.len()),
        "nothing to do: the loader loads the scheduler again whenever a CPU goes offline or comes online, and \
         threads that may only run on offline CPUs are left to the kernel",
    )
}

fn smt(places: Places) -> Check {
    const WHAT: &str = "SMT";
    let control = read(&places.sysfs.join("devices/system/cpu/smt/control"));
    match control.as_deref() {
        Some("on") => check(
            WHAT,
            Verdict::Ok,
            "on; idle cores are preferred to idle threads",
            "",
        ),
        Some(off @ ("off" | "forceoff")) => check(
            WHAT,
            Verdict::Note,
            format!("{off}: the sibling threads of each core are offline"),
            "nothing to do; switching it on makes the loader load the scheduler again",
        ),
        Some(other) => check(WHAT, Verdict::Ok, other, ""),
        None => check(WHAT, Verdict::Ok, "no control file", ""),
    }
}

/// Names the first settings in one line, and counts the others.
fn named(settings: &[&InUse]) -> String {
    const NAMED_MAX: usize = 5;
    let names: Vec<String> = settings
        .iter()
        .take(NAMED_MAX)
        .map(ToString::to_string)
        .collect();
    match settings.len().saturating_sub(NAMED_MAX) {
        0 => names.join("; "),
        more => format!("{}; and {more} more", names.join("; ")),
    }
}

fn cgroup_settings(places: Places, honors: Honors) -> Vec<Check> {
    const LIMITS: &str = "CPU limits";
    const WEIGHTS: &str = "CPU weights";
    const EMPTY: &str = "empty cgroups";
    let Some(root) = cgroups::mount_point(places.sysfs) else {
        return vec![check(
            LIMITS,
            Verdict::Note,
            "no cgroup v2 hierarchy, so limits and weights of cgroups cannot be checked",
            "the scheduler enforces no limit or weight of cgroup v1; rules on cgroups match nothing",
        )];
    };
    let found = cgroups::all_settings(&root);
    let is_limit = |u: &&InUse| matches!(u.setting, Setting::Max { .. });
    let unenforced = |all: &'_ [InUse]| {
        let some = all.iter().filter(|u| !honors.enforces(&u.setting));
        some.cloned().collect::<Vec<_>>()
    };
    let (in_use, empty) = (unenforced(&found.in_use), unenforced(&found.empty));
    let (limits, weights): (Vec<_>, Vec<_>) = in_use.iter().partition(is_limit);
    // Limits first: of many settings only the first are named.
    let (mut later, weights_later): (Vec<_>, Vec<_>) = empty.iter().partition(is_limit);
    later.extend(weights_later);
    vec![
        if limits.is_empty() {
            check(LIMITS, Verdict::Ok, "none that would not be enforced", "")
        } else {
            check(
                LIMITS,
                Verdict::Breaks,
                format!("would not be enforced: {}", named(&limits)),
                "remove the limits, confine these cgroups with cpuset.cpus, or accept it with \
                 `slipstream sched run --ignore-cpu-max`",
            )
        },
        if weights.is_empty() {
            check(WEIGHTS, Verdict::Ok, "none that would be ignored", "")
        } else {
            check(
                WEIGHTS,
                Verdict::Note,
                format!("would be ignored: {}", named(&weights)),
                "give these cgroups a class with a `weight` (`sched run --classes`), or nice values",
            )
        },
        if later.is_empty() {
            check(EMPTY, Verdict::Ok, "no limit or weight for later tasks", "")
        } else {
            check(
                EMPTY,
                Verdict::Note,
                format!(
                    "would not apply to tasks that start there: {}",
                    named(&later)
                ),
                "before tasks start in these cgroups, confine them with cpuset.cpus, give them a class \
                 (`sched run --classes`), or end the scheduler",
            )
        },
    ]
}

/// Since Linux 6.12 real-time throttling is gone and a deadline server reserves 5 % for the fair class.
/// `sched_ext` tasks have such a server only on kernels that show one in debugfs.
fn real_time(places: Places) -> Check {
    const WHAT: &str = "real-time tasks";
    let servers = places.sysfs.join("kernel/debug/sched");
    if servers.join("ext_server").is_dir() {
        return check(
            WHAT,
            Verdict::Ok,
            "the kernel keeps a share of each CPU for sched_ext",
            "",
        );
    }
    let throttle = read(&places.procfs.join("sys/kernel/sched_rt_runtime_us"));
    if throttle.as_deref() == Some("-1") {
        return check(
            WHAT,
            Verdict::Note,
            "throttling is off (sched_rt_runtime_us is -1)",
            "a real-time task that never sleeps keeps a CPU to itself; threads bound to that CPU \
             starve, and after 30 s the kernel ends the scheduler: set sched_rt_runtime_us, or give \
             such tasks a CPU of their own",
        );
    }
    check(
        WHAT,
        Verdict::Note,
        "this kernel shows no share of a CPU that is kept for sched_ext",
        "a real-time task that never sleeps starves threads bound to its CPU, and after 30 s the \
         kernel ends the scheduler; give such tasks a CPU of their own",
    )
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
            host.write("sys/devices/system/cpu/possible", b"0-1\n");
            host.write("sys/devices/system/cpu/smt/control", b"on\n");
            host.write("sys/fs/cgroup/cgroup.controllers", b"cpu\n");
            host.write(
                "sys/kernel/debug/sched/ext_server/cpu0/runtime",
                b"50000000\n",
            );
            host.write("proc/sys/kernel/osrelease", b"6.18.15\n");
            host.write("proc/self/status", b"Name:\tx\nCapEff:\t000001ffffffffff\n");
            host.btf("sched_ext_ops", 0, declared_imports().len());
            host
        }

        fn write(&self, path: &str, bytes: &[u8]) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }

        /// BTF with the first `kfuncs` functions, each with `hidden` extra arguments.
        fn btf(&self, ops: &str, hidden: usize, kfuncs: usize) {
            let mut w = Writer::new();
            w.strukt(ops, &["select_cpu", "enqueue"]);
            let aux = w.strukt("bpf_prog_aux", &["id"]);
            let aux = w.pointer(aux);
            for import in &declared_imports()[..kfuncs] {
                let mut params = vec![("x", 0); import.params];
                params.extend(vec![("aux", aux); hidden]);
                w.function(&import.name, &params);
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
            assert_eq!(breaks(&checks), verdict == Verdict::Breaks);
            if verdict == Verdict::Ok {
                assert_eq!(c.remedy, "", "no remedy is needed");
            }
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
        h.btf("other_ops", 0, declared_imports().len());
        h.check("kernel types", Verdict::Missing, "no struct sched_ext_ops");
        h.btf("sched_ext_ops", 1, declared_imports().len());
        h.check(
            "kernel functions",
            Verdict::Missing,
            "hidden argument of scx_bpf_now",
        );
        let last = declared_imports().len() - 1;
        h.btf("sched_ext_ops", 0, last);
        let part = format!("not there: {}", declared_imports()[last].name);
        h.check("kernel functions", Verdict::Missing, &part);
        h.write("sys/kernel/btf/vmlinux", b"junk");
        h.check("kernel types", Verdict::Missing, "not BTF");
        std::fs::remove_file(h.0.path().join("sys/kernel/btf/vmlinux")).unwrap();
        h.check("kernel types", Verdict::Missing, "No such file");

        // As it reads without `isolcpus=`, and with it.
        let h = Host::good();
        h.write("sys/devices/system/cpu/isolated", b"\n");
        h.check("isolated CPUs", Verdict::Ok, "none");
        h.write("sys/devices/system/cpu/isolated", b"1\n");
        h.check("isolated CPUs", Verdict::Missing, "CPUs 1 are isolated");

        let h = Host::good();
        h.write("proc/self/status", b"CapEff:\t0000000000000000\n");
        h.check(
            "privileges",
            Verdict::Missing,
            "without CAP_BPF, CAP_PERFMON, CAP_SYS_ADMIN",
        );
        std::fs::remove_file(h.0.path().join("sys/devices/system/cpu/online")).unwrap();
    }

    #[test]
    fn imports_are_the_declarations_of_the_header() {
        let of = |name: &str| declared_imports().iter().find(|i| i.name == name);
        let import = |name: &str, params| Import {
            name: name.to_owned(),
            params,
            is_weak: false,
        };
        // Functions that a hand-written list had omitted.
        for (name, params) in [
            ("scx_bpf_dsq_move", 4),
            ("bpf_cpumask_test_cpu", 2),
            ("scx_bpf_now", 0),
        ] {
            assert_eq!(of(name), Some(&import(name, params)));
        }
        assert!(of("runqueues").is_none(), "a variable");
        assert_eq!(plain_name("scx_bpf_x___count"), "scx_bpf_x");
        let weak = imports_of(
            "#define X 1\n/* extern int no(void) __ksym; */\nextern struct cpumask *\n\
             a_b(int x,\n\tu64 y) __ksym __weak;\nextern int other(void);\n",
        );
        let expected = Import {
            is_weak: true,
            ..import("a_b", 2)
        };
        assert_eq!(weak, [expected]);
    }

    #[test]
    fn what_would_be_lost_is_said_by_name() {
        let h = Host::good();
        h.check("CPU limits", Verdict::Ok, "none");
        h.write("sys/fs/cgroup/kubepods/pod1/cpu.weight", b"900\n");
        h.check(
            "CPU weights",
            Verdict::Note,
            "kubepods/pod1: cpu.weight 900",
        );
        h.write("sys/fs/cgroup/kubepods/pod1/cpu.max", b"50000 100000\n");
        h.check(
            "CPU limits",
            Verdict::Breaks,
            "kubepods/pod1: cpu.max 50000 100000 (0.50 CPUs)",
        );
        for i in 2..9 {
            let path = format!("sys/fs/cgroup/kubepods/pod{i}/cpu.max");
            h.write(&path, b"1000 100000\n");
        }
        h.check("CPU limits", Verdict::Breaks, "and 3 more");
        // A program that enforces the limits breaks nothing.
        let (sysfs, procfs) = (h.0.path().join("sys"), h.0.path().join("proc"));
        let places = Places {
            sysfs: &sysfs,
            procfs: &procfs,
        };
        let all = Honors {
            cpu_max: true,
            cpu_weight: true,
            cpu_idle: true,
        };
        assert!(!breaks(&examine_with(places, declared_imports(), all)));

        // Without tasks the limit breaks nothing yet, but nothing would enforce it later either.
        let h = Host::good();
        h.check("empty cgroups", Verdict::Ok, "no limit");
        for (pod, file, text) in [
            ("pod1", "cpu.weight", "900\n"),
            ("pod2", "cpu.max", "50000 100000\n"),
        ] {
            h.write(&format!("sys/fs/cgroup/{pod}/{file}"), text.as_bytes());
            h.write(
                &format!("sys/fs/cgroup/{pod}/cgroup.events"),
                b"populated 0\nfrozen 0\n",
            );
        }
        h.check("CPU limits", Verdict::Ok, "none");
        h.check(
            "empty cgroups",
            Verdict::Note,
            "pod2: cpu.max 50000 100000 (0.50 CPUs); pod1: cpu.weight 900",
        );

        let h = Host::good();
        std::fs::remove_file(h.0.path().join("sys/fs/cgroup/cgroup.controllers")).unwrap();
        h.check("CPU limits", Verdict::Note, "no cgroup v2 hierarchy");
    }

    #[test]
    fn changes_of_cpus_and_real_time_tasks_are_noted() {
        let h = Host::good();
        h.check("CPUs", Verdict::Ok, "all 2 possible CPUs");
        h.write("sys/devices/system/cpu/possible", b"0-7\n");
        h.check("CPUs", Verdict::Note, "6 of 8 possible CPUs are offline");
        h.write("sys/devices/system/cpu/smt/control", b"off\n");
        h.check("SMT", Verdict::Note, "off: the sibling threads");
        h.check("real-time tasks", Verdict::Ok, "keeps a share");
        let debug = h.0.path().join("sys/kernel/debug");
        std::fs::remove_dir_all(debug).unwrap();
        h.check("real-time tasks", Verdict::Note, "shows no share");
        h.write("proc/sys/kernel/sched_rt_runtime_us", b"-1\n");
        h.check("real-time tasks", Verdict::Note, "throttling is off");
    }
}
