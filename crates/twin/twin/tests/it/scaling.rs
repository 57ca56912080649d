//! `[autoscale]` with faults, with separate pools, and in runs that cannot end.

use slipstream_autoscale::{PoolSample, Scalers};
use slipstream_base::{SimTime, Slo};
use slipstream_config::cluster::{AutoscaleConfig, Cluster};
use slipstream_report::Objectives;
use slipstream_twin::{
    Decision, Observed, Options, PoolSizeChange, RequestRecord, Scaling, Sink, simulate,
};

use crate::{cluster, constant, run, workload};

/// Arrival and worker of each request that was answered.
#[derive(Default)]
struct Answers(Vec<(f64, u32)>);

impl Sink for Answers {
    fn on_request(&mut self, record: &RequestRecord<'_>) {
        assert_eq!(record.error, None, "at {}", record.request.due);
        let rank = record.rank.expect("it was answered");
        self.0
            .push((record.request.due.as_secs_f64(), rank.worker.0));
    }
}

impl Answers {
    /// Arrivals of the first and the last request of `worker`, s.
    fn of(&self, worker: u32) -> Option<(f64, f64)> {
        let own = || self.0.iter().filter(|of| of.1 == worker).map(|of| of.0);
        Some((own().reduce(f64::min)?, own().reduce(f64::max)?))
    }
}

/// Requests of 0.5 s, 2 per second for 100 s, between whole and half seconds.
const LIGHT: &str = "requests = 200\n[arrival]\nkind = \"constant\"\nrate_per_s = 2\n\
                     [[class]]\nisl = 200\nosl = 40\n";

/// Workers of 8 requests each, of which `start` are wanted first; they take 5 s to start.
fn scaled(workers: u32, start: u32, more: &str) -> Cluster {
    constant(
        workers,
        &format!(
            "max_num_seqs = 8\nstartup_s = 5\n[router]\npolicy = \"round_robin\"\n[autoscale]\n\
             policy = \"utilization\"\ntarget = 0.6\ninterval_s = 5\ncooldown_s = 20\n\
             workers_start = {start}\n{more}"
        ),
    )
}

fn slo(text: &str) -> Options {
    Options {
        slo: Objectives::from(text.parse::<Slo>().unwrap()),
        ..Options::default()
    }
}

/// The load needs one worker. It must not be the one that is lost.
#[test]
fn a_pool_does_not_shrink_to_a_crashed_worker() {
    for fault in ["crash", "drain"] {
        let event = format!("[[event]]\nkind = \"{fault}\"\nworker = 0\nat_s = 3.45\n");
        let mut answers = Answers::default();
        let outcome = run(
            &scaled(4, 4, &event),
            &workload(LIGHT),
            &Options::default(),
            &mut answers,
        );
        assert_eq!(outcome.totals.requests.succeeded, 200, "{fault}");
        let scaling = outcome.scaling.unwrap();
        let wanted = scaling.changes.last().unwrap().wanted;
        assert_eq!(wanted, 1, "{fault}: {scaling:?}");
        assert!(answers.of(0).unwrap().1 < 3.45, "{fault}");
        assert!(answers.of(1).unwrap().1 > 99.0, "{fault}");
    }
}

/// Two are wanted throughout: a third starts when the first is lost, at its cost, and stays when that one is back.
#[test]
fn others_start_in_the_place_of_lost_workers() {
    for (fault, until) in [
        ("crash", ""),
        ("crash", "until_s = 30"),
        ("drain", "until_s = 30"),
    ] {
        let more = format!(
            "workers_min = 2\n[[event]]\nkind = \"{fault}\"\nworker = 0\nat_s = 10.45\n{until}\n"
        );
        let mut answers = Answers::default();
        let outcome = run(
            &scaled(4, 2, &more),
            &workload(LIGHT),
            &Options::default(),
            &mut answers,
        );
        let (from, to) = answers.of(2).expect("it took its place");
        assert!((15.45..17.0).contains(&from) && to > 98.0, "{from} {to}");
        assert!(answers.of(0).unwrap().1 < 10.45, "{fault} {until}");
        assert_eq!(answers.of(3), None);
        let scaling = outcome.scaling.unwrap();
        assert_eq!(scaling.changes, [], "as many are wanted as before");
        let two = 2.0 * outcome.ended_at.as_secs_f64();
        assert!((scaling.gpu_s - two).abs() < 1e-6, "{scaling:?}");
    }
}

/// There is no other: it is used when it has started again, and no second start is waited for.
#[test]
fn a_lost_worker_that_nothing_replaces_comes_back() {
    let more =
        "workers_min = 2\n[[event]]\nkind = \"crash\"\nworker = 0\nat_s = 10.45\nuntil_s = 30\n";
    let mut answers = Answers::default();
    let outcome = run(
        &scaled(2, 2, more),
        &workload(LIGHT),
        &Options::default(),
        &mut answers,
    );
    let own: Vec<f64> = (answers.0.iter())
        .filter(|of| of.1 == 0 && of.0 > 10.45)
        .map(|of| of.0)
        .collect();
    let first = own.iter().copied().reduce(f64::min).unwrap();
    assert!((35.0..36.5).contains(&first), "{first}");
    // It keeps its GPU until then.
    let two = 2.0 * outcome.ended_at.as_secs_f64();
    assert!((outcome.scaling.unwrap().gpu_s - two).abs() < 1e-6);
}

fn apart(more: &str) -> Cluster {
    cluster(&format!(
        "[model]\npreset = \"qwen3-8b\"\n[engine]\nnum_gpu_blocks = 65536\nmax_model_len = 16384\n\
         max_num_batched_tokens = 1000\n[engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n\
         [pool.p]\nrole = \"prefill\"\nworkers = 4\n[pool.d]\nrole = \"decode\"\nworkers = 4\n{more}"
    ))
}

/// A prompt takes 8 passes of 10 ms, and answers compute together: 20 per second need 2 prefill workers.
#[test]
fn late_first_tokens_add_prefill_workers() {
    let cluster = apart("[autoscale]\npolicy = \"slo\"\ninterval_s = 3\ncooldown_s = 6\n");
    let load = workload(
        "requests = 1200\n[arrival]\nkind = \"constant\"\nrate_per_s = 20\n\
         [[class]]\nisl = 8000\nosl = 10\n",
    );
    let outcome = run(&cluster, &load, &slo("ttft=600ms"), &mut ());
    let scaling = outcome.scaling.unwrap();
    assert_eq!(scaling.pools[0].name, "p");
    assert!(scaling.pools[0].wanted_max >= 2, "{scaling:?}");
    assert_eq!(outcome.totals.requests.succeeded, 1200);
}

/// Nothing will ever end the transfers of worker 0: decisions alone do not keep a run going.
#[test]
fn a_stuck_run_is_found_although_workers_are_decided() {
    let cut_off = "[network]\nmode = \"flows\"\n[[event]]\nkind = \"link\"\nworker = 0\nat_s = 0.5\nshare = 0\n";
    let load = workload(
        "requests = 40\n[arrival]\nkind = \"constant\"\nrate_per_s = 4\n\
         [[class]]\nisl = 400\nosl = 50\n",
    );
    let options = Options {
        time_max: SimTime::from_secs_f64(86_400.0),
        ..slo("ttft=1s")
    };
    let plain = run(&apart(cut_off), &load, &options, &mut ());
    assert!(plain.cut.unwrap().starts_with("stuck: "));
    for policy in ["utilization", "queue", "slo"] {
        let more = format!("[autoscale]\npolicy = \"{policy}\"\nworkers_start = 4\n{cut_off}");
        let outcome = run(&apart(&more), &load, &options, &mut ());
        let cut = outcome.cut.unwrap();
        assert!(cut.starts_with("stuck: "), "{policy}: {cut}");
        // All that can still change is decided before: an idle pool shrinks to its minimum.
        let scaling = outcome.scaling.unwrap();
        let decode = scaling.changes.iter().rfind(|c| c.pool == "d").unwrap();
        assert_eq!(decode.wanted, 1, "{policy}: {scaling:?}");
    }
}

#[test]
fn scaling_by_ttft_needs_an_objective() {
    let cluster = constant(2, "[autoscale]\npolicy = \"slo\"\n");
    let read = |path: &std::path::Path| std::fs::read(path);
    let simulated =
        |load: &str, options: &Options| simulate(&cluster, &workload(load), options, read, &mut ());
    for options in [Options::default(), slo("tpot=50ms")] {
        let refused = simulated(LIGHT, &options).expect_err("nothing would add workers");
        let text = refused.to_string();
        for part in ["pool `main`", "`autoscale.policy`", "`--slo ttft=1s`"] {
            assert!(text.contains(part), "{text}");
        }
    }
    assert!(simulated(LIGHT, &slo("ttft=1s")).is_ok());
    // An objective of a class is enough.
    let classes = |text: Option<&str>| {
        let of = |text: &str| text.parse::<Slo>().unwrap();
        Options {
            slo: Objectives {
                all: Some(of("tpot=1s")),
                classes: vec![("a".into(), text.map(of)), ("b".into(), None)],
            },
            ..Options::default()
        }
    };
    assert!(simulated(LIGHT, &classes(Some("ttft=1s"))).is_ok());
    assert!(simulated(LIGHT, &classes(Some("e2e=1s"))).is_err());
}

/// The decisions of a run, and the requests that missed a TTFT.
struct Scales {
    decisions: Vec<Decision>,
    ttft_ns: u64,
    missed: u64,
    ended: u64,
}

impl Scales {
    fn new(ttft_s: f64) -> Scales {
        Scales {
            decisions: Vec::new(),
            ttft_ns: SimTime::from_secs_f64(ttft_s).0,
            missed: 0,
            ended: 0,
        }
    }
}

impl Sink for Scales {
    fn on_request(&mut self, record: &RequestRecord<'_>) {
        assert_eq!(record.error, None);
        self.ended += 1;
        let ttft_ns = record.first.since(record.request.due);
        self.missed += u64::from(ttft_ns > self.ttft_ns);
    }

    fn on_scale(&mut self, pool: &str, decision: &Decision) {
        assert_eq!(pool, "main");
        self.decisions.push(*decision);
    }
}

/// From 4 to 80 requests per second in 240 s. A worker answers 8 at a time, in 0.4 s each: 20 per second.
const RAMP: &str = "duration_s = 240\n[arrival]\nkind = \"ramp\"\nfrom_per_s = 4\nto_per_s = 80\nramp_s = 240\n\
                    [[class]]\nisl = 200\nosl = 40\n";

fn ramped(policy: &str) -> Cluster {
    constant(
        12,
        &format!(
            "max_num_seqs = 8\nstartup_s = 30\n[router]\npolicy = \"least_requests\"\n[autoscale]\n\
             policy = \"{policy}\"\ninterval_s = 5\ncooldown_s = 60\n"
        ),
    )
}

/// A live server has counters and no `[autoscale]` of its own: the states of a run, as its counters would show them.
#[test]
fn a_live_server_decides_as_the_twin_in_the_same_states() {
    for policy in ["utilization", "queue", "slo", "predictive"] {
        let cluster = ramped(policy);
        let mut scales = Scales::new(1.0);
        run(&cluster, &workload(RAMP), &slo("ttft=1s"), &mut scales);
        let config = AutoscaleConfig {
            ttft_s: Some(1.0),
            ..cluster.pools[0].autoscale.unwrap()
        };
        let mut sample = PoolSample {
            ready: 1,
            ..PoolSample::default()
        };
        let mut scalers = Scalers::new();
        scalers.add("main", config, 8, sample, SimTime::ZERO);
        let mut ups = 0;
        for decision in &scales.decisions {
            let observed = decision.observed;
            sample = PoolSample {
                ready: observed.ready,
                waiting: observed.waiting,
                running: observed.running,
                arrived_total: sample.arrived_total + observed.arrivals,
                first_tokens_total: sample.first_tokens_total
                    + u64::from(observed.ttft_ratio.is_some()),
                ttft_total_s: sample.ttft_total_s + observed.ttft_ratio.unwrap_or(0.0),
            };
            assert_eq!(scalers.next_decision(), Some(decision.at));
            let live = scalers.decide(decision.at, |_| sample)[0].decision;
            assert_eq!(
                (live.before, live.wanted, live.observed.arrivals),
                (decision.before, decision.wanted, observed.arrivals),
                "{policy} at {}",
                decision.at
            );
            ups += u64::from(decision.wanted > decision.before);
        }
        assert!(ups >= 2, "{policy}: {:?}", scales.decisions);
    }
}

/// Workers take 30 s to start, and the load rises: those that the trend asks for are ready earlier.
#[test]
fn a_predictive_policy_misses_fewer_objectives_on_a_ramp() {
    let measure = |policy: &str| {
        let mut scales = Scales::new(0.5);
        let outcome = run(
            &ramped(policy),
            &workload(RAMP),
            &slo("ttft=500ms"),
            &mut scales,
        );
        (scales.missed, scales.ended, outcome.scaling.unwrap())
    };
    let (late, all, reactive) = measure("utilization");
    let (predicted, same, predictive) = measure("predictive");
    assert_eq!(all, same);
    // docs/autoscale.md has these figures. A queue that has formed asks for all workers, which stay for a cooldown.
    assert_eq!((late, predicted, all), (683, 64, 10_072));
    let gpu_s = |scaling: &Scaling| scaling.gpu_s.round();
    assert_eq!((gpu_s(&reactive), gpu_s(&predictive)), (1_872.0, 1_203.0));
}

/// Wants three workers from 20 s on, and none before.
struct Function(Vec<(SimTime, Observed, u32)>);

impl Sink for Function {
    fn recommends(&self) -> bool {
        true
    }

    fn recommend(&mut self, pool: &str, now: SimTime, observed: &Observed, wanted: u32) -> u32 {
        assert_eq!(pool, "main");
        self.0.push((now, *observed, wanted));
        if now >= SimTime::from_secs_f64(20.0) {
            3
        } else {
            0
        }
    }
}

#[test]
fn a_function_of_the_program_decides() {
    let cluster = |workers_max: u32| {
        constant(
            4,
            &format!(
                "max_num_seqs = 8\n[autoscale]\npolicy = \"custom\"\ninterval_s = 5\nworkers_max = {workers_max}\n"
            ),
        )
    };
    for (workers_max, wanted) in [(4, 3), (2, 2)] {
        let mut function = Function(Vec::new());
        let outcome = run(
            &cluster(workers_max),
            &workload(LIGHT),
            &Options::default(),
            &mut function,
        );
        let at = SimTime::from_secs_f64;
        assert_eq!(
            outcome.scaling.unwrap().changes,
            [PoolSizeChange {
                at: at(20.0),
                pool: "main".into(),
                before: 1,
                wanted
            }]
        );
        // 2 per second for 5 s; 40 tokens of 10 ms each are under way for less than 0.5 s.
        let (first, observed, before) = function.0[0];
        assert_eq!((first, before), (at(5.0), 1));
        assert_eq!(
            (observed.ready, observed.arrivals, observed.slots),
            (1, 10, 8)
        );
        assert_eq!(function.0[4].2, wanted);
    }
    let read = |path: &std::path::Path| std::fs::read(path);
    let refused = simulate(
        &cluster(4),
        &workload(LIGHT),
        &Options::default(),
        read,
        &mut (),
    );
    let text = refused.expect_err("there is no function").to_string();
    for part in ["pool `main`", "\"custom\"", "Python", "\"utilization\""] {
        assert!(text.contains(part), "{text}");
    }
}
