//! The twin beside an engine of flesh: a run of vLLM that somebody measured and published.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use slipstream_twin::{Options, RequestRecord, Sink, simulate};

use crate::{cluster, workload};

/// The measured run, if this machine has it.
fn measured() -> Option<PathBuf> {
    let data = std::env::var_os("SLIPSTREAM_DATA").map_or(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"),
        PathBuf::from,
    );
    let folder = data.join("accuracy/runs/RTXPRO6000__Llama-3.1-8B");
    if !folder.is_dir() {
        eprintln!("skipped: no {}", folder.display());
        return None;
    }
    Some(folder)
}

/// The columns of these names of a CSV file without quotes, as numbers.
fn columns<const N: usize>(path: &Path, names: [&str; N]) -> Vec<[f64; N]> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().unwrap().split(',').collect();
    let places = names.map(|name| header.iter().position(|h| *h == name).unwrap());
    lines
        .map(|line| {
            let cells: Vec<&str> = line.split(',').collect();
            places.map(|place| cells[place].parse().unwrap())
        })
        .collect()
}

/// TTFT, TPOT and end-to-end latency of each request in its order, ms.
#[derive(Default)]
struct Times(Vec<(u64, [f64; 3])>);

impl Sink for Times {
    fn on_request(&mut self, r: &RequestRecord<'_>) {
        let ms = |from: slipstream_base::SimTime, to: slipstream_base::SimTime| {
            to.since(from) as f64 / 1e6
        };
        let gaps = f64::from(r.output_tokens.saturating_sub(1).max(1));
        let times = [
            ms(r.request.due, r.first),
            ms(r.first, r.last) / gaps,
            ms(r.request.due, r.last),
        ];
        self.0.push((r.request.id().0, times));
    }
}

/// A server that is past its capacity: nearly all of its TTFT is waiting, where an error of every
/// step adds up.
#[test]
fn a_measured_run_of_vllm_is_as_far_off_as_the_docs_say() {
    let Some(folder) = measured() else { return };
    let asked = columns(
        &folder.join("requests.csv"),
        ["sched_arrival_s", "input_tokens", "output_tokens"],
    );
    let truth = columns(
        &folder.join("truth_requests.csv"),
        ["ttft_ms", "tpot_ms", "e2e_ms"],
    );
    let mut trace = String::new();
    for [at_s, input, output] in &asked {
        let at_ms = at_s * 1e3;
        writeln!(
            trace,
            "{{\"timestamp\": {at_ms:.0}, \"input_length\": {input}, \"output_length\": {output}}}"
        )
        .unwrap();
    }
    // What `deployment.json` says of the server.
    let cluster = cluster(
        "[model]\npreset = \"llama-3.1-8b\"\n\
         [engine]\nmax_num_seqs = 128\nmax_num_batched_tokens = 2048\n\
         [engine.timing]\nkind = \"roofline\"\ngpu = \"rtx-pro-6000\"\n\
         [pool.main]\nworkers = 1\n",
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.jsonl");
    std::fs::write(&file, trace).unwrap();
    let workload = workload(&format!(
        "[trace]\nfile = {:?}\n",
        file.display().to_string()
    ));
    let mut times = Times::default();
    let read = |path: &Path| std::fs::read(path);
    simulate(&cluster, &workload, &Options::default(), read, &mut times).unwrap();
    times.0.sort_by_key(|(id, _)| *id);
    assert_eq!(times.0.len(), truth.len());

    let mean =
        |of: &dyn Fn(usize) -> f64| (0..truth.len()).map(of).sum::<f64>() / truth.len() as f64;
    // Largest error of the mean, and mean error of a request, that docs/twin.md admits.
    for (metric, name, of_mean, of_each) in [
        (0, "TTFT", 0.09, 0.155),
        (1, "TPOT", 0.035, 0.04),
        (2, "E2E", 0.05, 0.05),
    ] {
        let simulated = mean(&|i| times.0[i].1[metric]);
        let measured = mean(&|i| truth[i][metric]);
        let each = mean(&|i| (times.0[i].1[metric] / truth[i][metric] - 1.0).abs());
        let error = simulated / measured - 1.0;
        eprintln!("{name}: {simulated:.2} of {measured:.2} ms, {error:+.3}; each {each:.3}");
        assert!(error.abs() <= of_mean, "{name}: {error:+.3}");
        assert!(each <= of_each, "{name}: each {each:.3}");
    }
}
