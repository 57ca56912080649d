//! The twin compared with a real engine: a published measurement of vLLM.

use std::path::{Path, PathBuf};

use slipstream_twin::{Options, RequestRecord, Sink, simulate};

use crate::{cluster, workload};

/// The measured run, if this machine has it.
fn measured() -> Option<PathBuf> {
    let data = std::env::var_os("SLIPSTREAM_DATA").map_or(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../../shared/data"),
        PathBuf::from,
    );
    let folder = data.join("accuracy/runs/RTXPRO6000__Llama-3.1-8B");
    if !folder.is_dir() {
        eprintln!("skipped: no {}", folder.display());
        return None;
    }
    Some(folder)
}

/// The columns of these names of a CSV file without quotes.
fn columns<const N: usize>(path: &Path, names: [&str; N]) -> Vec<[String; N]> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().unwrap().split(',').collect();
    let places = names.map(|name| header.iter().position(|h| *h == name).unwrap());
    lines
        .map(|line| {
            let cells: Vec<&str> = line.split(',').collect();
            places.map(|place| cells[place].to_owned())
        })
        .collect()
}

fn number(cell: &str) -> f64 {
    cell.parse().unwrap()
}

/// Tokens per block of the recorded ids.
const BLOCK: u32 = 16;

/// A request of the recording as a line of Mooncake's format: its send time, its lengths, and the
/// shared blocks of its prompt.
fn line_of(index: usize, [at_s, input, output, ids]: &[String; 4]) -> String {
    let tokens: u32 = input.parse().unwrap();
    let mut ids: Vec<u64> = ids.split(' ').map(|id| id.parse().unwrap()).collect();
    assert_eq!(ids.len() as u32, tokens / BLOCK);
    if !tokens.is_multiple_of(BLOCK) {
        // The rest of a prompt after its full blocks is unique.
        ids.push(1 << 40 | index as u64);
    }
    let at_ms = number(at_s) * 1e3;
    format!(
        "{{\"timestamp\": {at_ms}, \"input_length\": {input}, \"output_length\": {output}, \"hash_ids\": {ids:?}}}\n"
    )
}

/// TTFT, TPOT and end-to-end latency of each request, ms; tokens found cached in all of them.
#[derive(Default)]
struct Times(Vec<(u64, [f64; 3])>, u64);

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
        self.1 += u64::from(r.cached_tokens);
    }
}

/// An overloaded server: nearly all of its TTFT is waiting, where an error of every step adds up.
/// Requests are replayed as recorded: the same send times, and the same shared prefixes.
#[test]
fn a_measured_run_of_vllm_is_predicted_within_the_bounds() {
    for kind in ["calibrated", "roofline"] {
        check_measured_run(kind);
    }
}

fn check_measured_run(kind: &str) {
    let Some(folder) = measured() else { return };
    let asked = columns(
        &folder.join("requests.csv"),
        [
            "arrival_s",
            "input_tokens",
            "output_tokens",
            "block16_hash_ids",
        ],
    );
    let truth = columns(
        &folder.join("truth_requests.csv"),
        ["ttft_ms", "tpot_ms", "e2e_ms"],
    );
    let trace: String = (0..).zip(&asked).map(|(i, row)| line_of(i, row)).collect();
    // The server's settings in `deployment.json`.
    let cluster = cluster(&format!(
        "[model]\npreset = \"llama-3.1-8b\"\n\
         [engine]\nmax_num_seqs = 128\nmax_num_batched_tokens = 2048\n\
         [engine.timing]\nkind = \"{kind}\"\ngpu = \"rtx-pro-6000\"\n\
         [pool.main]\nworkers = 1\n",
    ));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.jsonl");
    std::fs::write(&file, trace).unwrap();
    let workload = workload(&format!(
        "[trace]\nfile = {:?}\ntokens_per_id = {BLOCK}\n",
        file.display().to_string()
    ));
    let mut times = Times::default();
    let read = |path: &Path| std::fs::read(path);
    simulate(&cluster, &workload, &Options::default(), read, &mut times).unwrap();
    times.0.sort_by_key(|(id, _)| *id);
    assert_eq!(times.0.len(), truth.len());
    assert!(times.1 > 0, "no recorded prefix was hit");

    let mean =
        |of: &dyn Fn(usize) -> f64| (0..truth.len()).map(of).sum::<f64>() / truth.len() as f64;
    // Largest error of the mean, and largest mean error per request: a requirement for any usable
    // model, not the errors of this one (docs/twin.md has those).
    let of_means = match kind {
        "calibrated" => [0.06, 0.03, 0.04],
        _ => [0.15, 0.07, 0.10],
    };
    for (metric, name, of_each) in [(0, "TTFT", 0.25), (1, "TPOT", 0.08), (2, "E2E", 0.10)] {
        let of_mean: f64 = of_means[metric];
        let measured = |i: usize| number(&truth[i][metric]);
        let simulated = |i: usize| times.0[i].1[metric];
        let each = mean(&|i| (simulated(i) / measured(i) - 1.0).abs());
        let (simulated, measured) = (mean(&simulated), mean(&measured));
        let error = simulated / measured - 1.0;
        eprintln!(
            "{kind}, {name}: {simulated:.2} of {measured:.2} ms, {error:+.4}; each {each:.4}"
        );
        assert!(error.abs() <= of_mean, "{name}: {error:+.4}");
        assert!(each <= of_each, "{name}: each {each:.4}");
    }
    eprintln!("cached tokens: {}", times.1);
}
