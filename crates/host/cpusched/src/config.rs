//! The file of `slipstream sched sim`, and the runs that it describes.

use serde::Deserialize;

use crate::machine::{Costs, IdleState, Machine, Mechanism};
use crate::perfetto::Trace;
use crate::policy::{LLC_CPUS_MAX, Params};
use crate::result::{RunResult, SimError};
use crate::rtapp;
use crate::sched::SchedulerKind;
use crate::sched::{CPUS_MAX, LLCS_MAX};
use crate::sim;
use crate::workload::{Hotplug, RealTime, Schbench, Span, Workload};

/// Why a file is rejected.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not TOML, or an unknown or ill-typed key. The text names the place.
    #[error("{0}")]
    Toml(#[from] toml::de::Error),
    /// All invalid values.
    #[error("{}", .0.join("\n"))]
    Values(Vec<String>),
    /// The rt-app file is invalid.
    #[error("`workload.file`: {0}")]
    RtApp(#[from] rtapp::RtAppError),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    machine: MachineFile,
    #[serde(default)]
    costs: CostsFile,
    #[serde(default)]
    policy: PolicyFile,
    run: RunFile,
    workload: WorkloadFile,
    #[serde(default)]
    real_time: Vec<RealTimeFile>,
    #[serde(default)]
    hotplug: Vec<HotplugFile>,
}

/// `[[real_time]]`: a CPU that a real-time task takes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RealTimeFile {
    cpu: u32,
    #[serde(default)]
    from_ms: u64,
    run_ms: u64,
    /// Interval between bursts; without it, the task runs once.
    period_ms: Option<u64>,
}

/// `[[hotplug]]`: a CPU that goes offline or comes back online.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HotplugFile {
    cpu: u32,
    at_ms: u64,
    online: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MachineFile {
    llcs: u32,
    cpus_per_llc: u32,
    #[serde(default = "one")]
    threads_per_core: u32,
}

fn one() -> u32 {
    1
}

/// `[costs]`: a preset, and values that override it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct CostsFile {
    preset: Option<Preset>,
    /// Waking an idle CPU always takes this long, us; a sweep runs once per value.
    wake_idle_us: Option<OneOrMany>,
    switch_ns: Option<u64>,
    ipi_ns: Option<u64>,
    kick_ns: Option<u64>,
    llc_refill_ns: Option<u64>,
    cpu_refill_ns: Option<u64>,
    tick_us: Option<u64>,
    idle_after_us: Option<Vec<u64>>,
    idle_exit_us: Option<Vec<u64>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u64),
    Many(Vec<u64>),
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Preset {
    BareMetal,
    InstructionClock,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    wake_idle_us: Option<u64>,
    residency_runs: Option<u32>,
    saturated_runs: Option<u32>,
    slack_pct: Option<u32>,
    saturated_pct: Option<u32>,
    relaxed_pct: Option<u32>,
    preempt: Option<bool>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RunFile {
    #[serde(default = "default_seed")]
    seed: u64,
    /// Runs per row, with consecutive seeds; the table shows all of them together.
    #[serde(default = "one")]
    seeds: u32,
    #[serde(default = "default_warmup")]
    warmup_ms: u64,
    duration_ms: u64,
    #[serde(default)]
    loads_pct: Vec<u32>,
    #[serde(default)]
    policies: Vec<SchedulerKind>,
    /// LLC counts to run at instead of `machine.llcs`.
    #[serde(default)]
    sweep_llcs: Vec<u32>,
}

fn default_seed() -> u64 {
    1
}

fn default_warmup() -> u64 {
    100
}

#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
enum WorkloadFile {
    Schbench {
        cpus_per_message_thread: u32,
        work_us: u64,
        #[serde(default)]
        route_us: u64,
        #[serde(default)]
        linger_us: u64,
        #[serde(default)]
        linger_share: Option<f64>,
        mechanism: Mechanism,
        #[serde(default)]
        hogs: u32,
    },
    SchbenchClosed {
        #[serde(default = "one")]
        message_threads: u32,
        work_us: u64,
        #[serde(default)]
        hogs: u32,
    },
    Pairs {
        pairs: u32,
        #[serde(default = "one")]
        consumers: u32,
        mechanism: Mechanism,
        #[serde(default)]
        linger_us: u64,
        #[serde(default)]
        hogs: u32,
    },
    RequestResponse {
        pairs: u32,
        think_us: u64,
        work_us: u64,
        mechanism: Mechanism,
        #[serde(default)]
        hogs: u32,
    },
    Inference {
        engines: u32,
        requests_per_s: f64,
        #[serde(default)]
        hogs: u32,
    },
    RtApp {
        file: String,
    },
}

/// One planned run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The host.
    pub machine: Machine,
    /// Costs of the host's operations.
    pub costs: Costs,
    /// Fixed cost of waking an idle CPU, us, if the file gives one.
    pub wake_idle_us: Option<u64>,
    /// Offered load, percent; `None` for workloads that set their own.
    pub load_pct: Option<u32>,
    /// The scheduler.
    pub kind: SchedulerKind,
    /// Its work.
    pub workload: Workload,
    /// The group whose latencies the table shows; index into the workload's groups.
    pub shown_group: usize,
}

/// A parsed file: runs, in the order of the table's rows.
#[derive(Clone, Debug)]
pub struct Experiment {
    /// Seed of the first run of each row.
    pub seed: u64,
    /// Runs per row.
    pub seeds: u32,
    /// Parameters of our policy.
    pub params: Params,
    /// Whether the file sets the policy's parameter for the cost of waking an idle CPU.
    wake_idle_given: bool,
    /// Warm-up, not measured, ns.
    pub warmup_ns: u64,
    /// Measured time, ns.
    pub measure_ns: u64,
    /// The runs.
    pub plans: Vec<Plan>,
}

impl Experiment {
    /// Parses the file's text. `load_rtapp` returns the text of the rt-app file that it names.
    ///
    /// # Errors
    /// All invalid values together, each with its key and its valid range.
    pub fn parse(
        text: &str,
        load_rtapp: impl Fn(&str) -> Result<String, String>,
    ) -> Result<Experiment, ConfigError> {
        let file: File = toml::from_str(text)?;
        check(&file)?;
        let mut params = Params::with_defaults();
        let p = &file.policy;
        set(
            &mut params.wake_idle_ns,
            p.wake_idle_us.map(|us| us * 1_000),
        );
        set(&mut params.residency_runs, p.residency_runs);
        set(&mut params.saturated_runs, p.saturated_runs);
        set(&mut params.slack_pct, p.slack_pct);
        set(&mut params.saturated_pct, p.saturated_pct);
        set(&mut params.relaxed_pct, p.relaxed_pct);
        set(&mut params.preempt, p.preempt.map(u32::from));
        let kinds = if file.run.policies.is_empty() {
            SchedulerKind::ALL.to_vec()
        } else {
            file.run.policies.clone()
        };
        let sizes = if file.run.sweep_llcs.is_empty() {
            vec![file.machine.llcs]
        } else {
            file.run.sweep_llcs.clone()
        };
        let mut plans = Vec::new();
        for llcs in sizes {
            let machine = Machine {
                llcs,
                cpus_per_llc: file.machine.cpus_per_llc,
                threads_per_core: file.machine.threads_per_core,
            };
            for (wake_idle_us, costs) in costs(&file.costs) {
                let loads: Vec<Option<u32>> = if file.workload.has_loads() {
                    file.run.loads_pct.iter().map(|&l| Some(l)).collect()
                } else {
                    vec![None]
                };
                for load_pct in loads {
                    let (mut workload, shown_group) =
                        workload(&file.workload, machine, load_pct, &load_rtapp)?;
                    disturb(&file, &mut workload);
                    for &kind in &kinds {
                        plans.push(Plan {
                            machine,
                            costs: costs.clone(),
                            wake_idle_us,
                            load_pct,
                            kind,
                            workload: workload.clone(),
                            shown_group,
                        });
                    }
                }
            }
        }
        Ok(Experiment {
            seed: file.run.seed,
            seeds: file.run.seeds,
            params,
            wake_idle_given: p.wake_idle_us.is_some(),
            warmup_ns: file.run.warmup_ms * 1_000_000,
            measure_ns: file.run.duration_ms * 1_000_000,
            plans,
        })
    }

    /// Executes one of the runs.
    ///
    /// # Errors
    /// See [`SimError`].
    pub fn run(&self, plan: &Plan, trace: Option<&mut Trace>) -> Result<RunResult, SimError> {
        let mut params = self.params;
        if let (Some(us), false) = (plan.wake_idle_us, self.wake_idle_given) {
            // On a real host the loader measures it.
            params.wake_idle_ns = us * 1_000;
        }
        let mut trace = trace;
        let mut one = |seed: u64| {
            let sched = plan.kind.build(plan.machine, params);
            sim::run(
                plan.machine,
                &plan.costs,
                &plan.workload,
                sched,
                seed,
                self.warmup_ns,
                self.measure_ns,
                // With several runs, only the first one is traced.
                trace.take(),
            )
        };
        let mut all = one(self.seed)?;
        for i in 1..u64::from(self.seeds) {
            all.add(&one(self.seed + i)?);
        }
        Ok(all)
    }
}

impl WorkloadFile {
    /// Whether `run.loads_pct` sets the load of this workload.
    fn has_loads(&self) -> bool {
        matches!(
            self,
            WorkloadFile::Schbench { .. } | WorkloadFile::SchbenchClosed { .. }
        )
    }
}

/// Adds real-time tasks and hotplug events.
fn disturb(f: &File, w: &mut Workload) {
    let ns = |ms: u64| ms * 1_000_000;
    w.real_time = f
        .real_time
        .iter()
        .map(|r| RealTime {
            cpu: r.cpu,
            from_ns: ns(r.from_ms),
            run_ns: ns(r.run_ms),
            period_ns: ns(r.period_ms.unwrap_or(0)),
        })
        .collect();
    w.hotplug = f
        .hotplug
        .iter()
        .map(|h| Hotplug {
            cpu: h.cpu,
            at_ns: ns(h.at_ms),
            online: h.online,
        })
        .collect();
}

fn set<T>(to: &mut T, value: Option<T>) {
    if let Some(v) = value {
        *to = v;
    }
}

/// Values found to be wrong.
#[derive(Default)]
struct Wrong(Vec<String>);

impl Wrong {
    fn push(&mut self, what: String) {
        self.0.push(what);
    }

    fn need(&mut self, ok: bool, what: String) {
        if !ok {
            self.push(what);
        }
    }

    /// `workload.<key>` counts tasks.
    fn most(&mut self, key: &str, n: u32) {
        if n > 1_000_000 {
            self.push(format!("`workload.{key}` is {n}; at most 1000000"));
        }
    }
}

fn check(f: &File) -> Result<(), ConfigError> {
    let mut wrong = Wrong::default();
    let cpus = f.machine.llcs.saturating_mul(f.machine.cpus_per_llc);
    check_machine(f, &mut wrong);
    check_run(f, &mut wrong);
    check_disturbances(f, cpus, &mut wrong);
    check_costs(f, &mut wrong);
    check_workload(f, cpus, &mut wrong);
    if wrong.0.is_empty() {
        Ok(())
    } else {
        Err(ConfigError::Values(wrong.0))
    }
}

fn check_machine(f: &File, wrong: &mut Wrong) {
    let m = &f.machine;
    wrong.need(
        (1..=LLC_CPUS_MAX).contains(&m.cpus_per_llc),
        format!(
            "`machine.cpus_per_llc` is {}; it must be 1 to {LLC_CPUS_MAX} (split larger LLCs)",
            m.cpus_per_llc
        ),
    );
    wrong.need(
        matches!(m.threads_per_core, 1 | 2)
            && m.cpus_per_llc.is_multiple_of(m.threads_per_core.max(1)),
        format!(
            "`machine.threads_per_core` is {}; it must be 1, or 2 with an even `cpus_per_llc`",
            m.threads_per_core
        ),
    );
    for &llcs in f.run.sweep_llcs.iter().chain([&m.llcs]) {
        wrong.need(
            (1..=LLCS_MAX).contains(&llcs),
            format!("`machine.llcs` or `run.sweep_llcs` has {llcs}; it must be 1 to {LLCS_MAX}"),
        );
        let cpus = u64::from(llcs) * u64::from(m.cpus_per_llc);
        wrong.need(
            cpus <= u64::from(CPUS_MAX),
            format!(
                "`machine` has {cpus} CPUs in {llcs} LLCs; our scheduler takes at most {CPUS_MAX}"
            ),
        );
    }
}

fn check_run(f: &File, wrong: &mut Wrong) {
    wrong.need(
        (1..=600_000).contains(&f.run.duration_ms),
        format!(
            "`run.duration_ms` is {}; it must be 1 to 600000",
            f.run.duration_ms
        ),
    );
    wrong.need(
        f.run.warmup_ms <= 600_000,
        format!(
            "`run.warmup_ms` is {}; it must be at most 600000",
            f.run.warmup_ms
        ),
    );
    for &l in &f.run.loads_pct {
        wrong.need(
            (1..=200).contains(&l),
            format!("`run.loads_pct` has {l}; it must be 1 to 200"),
        );
    }
    wrong.need(
        f.workload.has_loads() != f.run.loads_pct.is_empty(),
        "`run.loads_pct` belongs to `workload.kind` `schbench` and `schbench-closed`, which need it; others set their own load".into(),
    );
    wrong.need(
        (1..=100).contains(&f.run.seeds),
        format!("`run.seeds` is {}; it must be 1 to 100", f.run.seeds),
    );
}

/// `[[real_time]]` and `[[hotplug]]`.
fn check_disturbances(f: &File, cpus: u32, wrong: &mut Wrong) {
    for r in &f.real_time {
        wrong.need(
            r.cpu < cpus,
            format!(
                "`real_time.cpu` is {}; the machine has CPUs 0 to {}",
                r.cpu,
                cpus.saturating_sub(1)
            ),
        );
        wrong.need(
            r.run_ms > 0 && r.period_ms.is_none_or(|p| p > r.run_ms),
            format!(
                "`real_time` on CPU {}: `run_ms` must be at least 1 and `period_ms` longer",
                r.cpu
            ),
        );
    }
    for h in &f.hotplug {
        wrong.need(
            h.cpu < cpus && cpus > 1,
            format!(
                "`hotplug.cpu` is {}; the machine has CPUs 0 to {}, of which one must stay",
                h.cpu,
                cpus.saturating_sub(1)
            ),
        );
    }
    let away = |cpu| f.hotplug.iter().any(|h| h.cpu == cpu && !h.online);
    wrong.need(
        cpus == 0 || (0..cpus.min(CPUS_MAX)).any(|cpu| !away(cpu)),
        "`hotplug` takes every CPU away; one must stay".into(),
    );
}

fn check_costs(f: &File, wrong: &mut Wrong) {
    wrong.need(
        f.costs.tick_us != Some(0),
        "`costs.tick_us` is 0; give the time between two ticks, such as 4000".into(),
    );
    match (&f.costs.idle_after_us, &f.costs.idle_exit_us) {
        (None, None) => {}
        (Some(a), Some(e)) if a.len() == e.len() && a.first() == Some(&0) && a.is_sorted() => {}
        _ => wrong.need(
            false,
            "`costs.idle_after_us` and `costs.idle_exit_us` go together: as many of each, the first starting at 0, in rising order"
                .into(),
        ),
    }
}

fn check_workload(f: &File, cpus: u32, wrong: &mut Wrong) {
    match &f.workload {
        WorkloadFile::Schbench {
            cpus_per_message_thread,
            work_us,
            linger_share,
            hogs,
            ..
        } => {
            if *cpus_per_message_thread == 0 || *work_us == 0 {
                wrong.push(
                    "`workload.cpus_per_message_thread` and `workload.work_us` must be at least 1"
                        .into(),
                );
            }
            if linger_share.is_some_and(|s| !(0.0..=1.0).contains(&s)) {
                wrong.push("`workload.linger_share` is a share: 0 to 1".into());
            }
            wrong.most("hogs", *hogs);
        }
        WorkloadFile::SchbenchClosed {
            message_threads,
            work_us,
            hogs,
        } => {
            if *message_threads == 0 || *message_threads > cpus || *work_us == 0 {
                wrong.push(
                    "`workload.message_threads` must be 1 to the number of CPUs, and `workload.work_us` at least 1"
                        .into(),
                );
            }
            if f.run.loads_pct.iter().any(|&l| l > 100) {
                wrong.push("`run.loads_pct`: a closed loop offers at most 100".into());
            }
            wrong.most("hogs", *hogs);
        }
        WorkloadFile::Pairs {
            pairs,
            consumers,
            hogs,
            ..
        } => {
            if *pairs == 0 || *consumers == 0 || *consumers > 1000 {
                wrong.push(
                    "`workload.pairs` must be at least 1 and `workload.consumers` 1 to 1000".into(),
                );
            }
            wrong.most("pairs", *pairs);
            wrong.most("hogs", *hogs);
        }
        WorkloadFile::RequestResponse { pairs, hogs, .. } => {
            wrong.most("pairs", *pairs);
            wrong.most("hogs", *hogs);
        }
        WorkloadFile::Inference {
            engines,
            requests_per_s,
            hogs,
        } => {
            if *engines == 0 || !requests_per_s.is_finite() || *requests_per_s <= 0.0 {
                wrong.push(
                    "`workload.engines` must be at least 1 and `workload.requests_per_s` above 0"
                        .into(),
                );
            }
            wrong.most("engines", *engines);
            wrong.most("hogs", *hogs);
        }
        WorkloadFile::RtApp { .. } => {}
    }
}

fn costs(f: &CostsFile) -> Vec<(Option<u64>, Costs)> {
    let finish = |mut c: Costs| {
        set(&mut c.switch_ns, f.switch_ns);
        set(&mut c.ipi_ns, f.ipi_ns);
        set(&mut c.kick_ns, f.kick_ns);
        set(&mut c.llc_refill_ns, f.llc_refill_ns);
        set(&mut c.cpu_refill_ns, f.cpu_refill_ns);
        set(&mut c.tick_ns, f.tick_us.map(|us| us * 1_000));
        if let (Some(after), Some(exit)) = (&f.idle_after_us, &f.idle_exit_us) {
            c.idle = after
                .iter()
                .zip(exit)
                .map(|(&a, &e)| IdleState {
                    after_ns: a * 1_000,
                    exit_ns: e * 1_000,
                })
                .collect();
        }
        c
    };
    let base = || match f.preset {
        Some(Preset::InstructionClock) => Costs::instruction_clock(),
        _ => Costs::bare_metal(),
    };
    let flat = |us: u64| (Some(us), finish(Costs::flat(us * 1_000)));
    match &f.wake_idle_us {
        None => vec![(None, finish(base()))],
        Some(OneOrMany::One(us)) => vec![flat(*us)],
        Some(OneOrMany::Many(many)) => many.iter().map(|&us| flat(us)).collect(),
    }
}

fn workload(
    f: &WorkloadFile,
    machine: Machine,
    load_pct: Option<u32>,
    load_rtapp: &impl Fn(&str) -> Result<String, String>,
) -> Result<(Workload, usize), ConfigError> {
    let us = |us: u64| us * 1_000;
    let load = f64::from(load_pct.unwrap_or(50)) / 100.0;
    let (mut w, shown, hogs) = match f {
        WorkloadFile::Schbench {
            cpus_per_message_thread,
            work_us,
            route_us,
            linger_us,
            linger_share,
            mechanism,
            hogs,
        } => {
            let linger = match linger_share {
                Some(share) => Span::Either(0, us(*linger_us), *share),
                None => Span::Fixed(us(*linger_us)),
            };
            let s = Schbench {
                message_threads: (machine.cpus() / cpus_per_message_thread).max(1),
                work: Span::Exp(us(*work_us)),
                route: Span::Fixed(us(*route_us)),
                linger,
                mechanism: *mechanism,
            };
            (Workload::schbench(machine, s, load), "worker", *hogs)
        }
        WorkloadFile::SchbenchClosed {
            message_threads,
            work_us,
            hogs,
        } => {
            let work = Span::Exp(us(*work_us));
            (
                Workload::schbench_closed(machine, *message_threads, work, load),
                "worker",
                *hogs,
            )
        }
        WorkloadFile::Pairs {
            pairs,
            consumers,
            mechanism,
            linger_us,
            hogs,
        } => {
            let linger = Span::Fixed(us(*linger_us));
            (
                Workload::pairs(machine, *pairs, *consumers, *mechanism, linger),
                "consumer",
                *hogs,
            )
        }
        WorkloadFile::RequestResponse {
            pairs,
            think_us,
            work_us,
            mechanism,
            hogs,
        } => {
            let (think, work) = (Span::Exp(us(*think_us)), Span::Exp(us(*work_us)));
            let w = Workload::request_response(machine, *pairs, think, work, *mechanism);
            (w, "server", *hogs)
        }
        WorkloadFile::Inference {
            engines,
            requests_per_s,
            hogs,
        } => (
            Workload::inference(machine, *engines, *requests_per_s),
            "detokenizer",
            *hogs,
        ),
        WorkloadFile::RtApp { file } => {
            let text = load_rtapp(file).map_err(|e| ConfigError::Values(vec![e]))?;
            let w = rtapp::parse(&text, machine)?;
            return Ok((w, 0));
        }
    };
    if hogs > 0 {
        w.add_hogs(machine, hogs);
    }
    let shown = w.group(shown);
    Ok((w, shown))
}
