//! Ranks that begin every step together: examples worked out by hand, a separately written model, and properties.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;

use proptest::prelude::*;
use slipstream_config::cluster::Cluster;
use slipstream_config::workload_file::Workload;
use slipstream_report::PassRecord;
use slipstream_twin::{Options, Outcome, RequestRecord, Sink};

use super::model::{APART, MS};
use super::{cluster, run, workload};

/// Of a request: its arrival, lengths, rank, first token and last one, ns.
#[derive(Clone, Debug, PartialEq)]
struct Ended {
    due: u64,
    isl: u32,
    osl: u32,
    rank: u16,
    first: u64,
    last: u64,
}

#[derive(Default)]
struct Records {
    ended: Vec<Ended>,
    /// Of each engine, start and end of its passes.
    passes: BTreeMap<u32, Vec<(u64, u64)>>,
    wants_passes: bool,
}

impl Sink for Records {
    fn on_request(&mut self, r: &RequestRecord<'_>) {
        assert_eq!(r.error, None);
        self.ended.push(Ended {
            due: r.request.due.0,
            isl: r.input_tokens,
            osl: r.output_tokens,
            rank: r.rank.map_or(u16::MAX, |rank| rank.dp_rank),
            first: r.first.0,
            last: r.last.0,
        });
    }

    fn wants_passes(&self) -> bool {
        self.wants_passes
    }

    fn on_pass(&mut self, pass: &PassRecord<'_>) {
        let passes = self.passes.entry(pass.engine).or_default();
        passes.push((pass.start.0, pass.end.0));
    }
}

fn simulate(cluster: &Cluster, load: &Workload, options: &Options) -> (Outcome, Vec<Ended>) {
    let mut records = Records::default();
    let outcome = run(cluster, load, options, &mut records);
    assert_eq!(outcome.cut, None);
    records.ended.sort_by_key(|e| (e.due, e.first, e.last));
    (outcome, records.ended)
}

/// `ranks` of a mixture that take turns. A pass takes 10 ms, and 10 us per token of a prompt.
fn ranks(ranks: u32, engine: &str) -> Cluster {
    cluster(&format!(
        "[model]\npreset = \"mixtral-8x7b\"\n[engine]\nnum_gpu_blocks = 65536\nmax_model_len = 16384\n\
         enable_prefix_caching = false\ndata_parallel_size = {ranks}\ndata_parallel_barrier = true\n{engine}\n\
         [engine.timing]\nkind = \"linear\"\nbase_ns = 10_000_000\nper_prefill_token_ns = 10_000\n\
         [router]\npolicy = \"round_robin\"\n"
    ))
}

/// Requests at given times, in ms, with their lengths.
fn at(requests: &[(u32, u32, u32)]) -> (tempfile::TempDir, Workload) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.jsonl");
    let lines: Vec<String> = requests
        .iter()
        .enumerate()
        .map(|(i, (at, isl, osl))| {
            let blocks: Vec<String> = (0..isl.div_ceil(512))
                .map(|block| (1_000 * i + block as usize).to_string())
                .collect();
            format!(
                "{{\"timestamp\": {at}, \"input_length\": {isl}, \"output_length\": {osl}, \"hash_ids\": [{}]}}\n",
                blocks.join(", ")
            )
        })
        .collect();
    std::fs::write(&path, lines.concat()).unwrap();
    let load = workload(&format!("[trace]\nfile = \"{}\"\n", path.display()));
    (folder, load)
}

fn times(ended: &[Ended]) -> Vec<(u64, u64)> {
    let ms = |e: &Ended| (e.first / MS, e.last / MS);
    ended.iter().map(ms).collect()
}

/// A: five tokens on rank 0. B: a prompt that takes 20 ms, on rank 1, which is idle. C comes while all run dummy batches, D after
/// they have paused, E after D's only step.
const FIVE: [(u32, u32, u32); 5] = [
    (0, 100, 5),
    (5, 1_000, 1),
    (100, 100, 1),
    (180, 100, 1),
    (195, 100, 1),
];

#[test]
fn every_step_waits_for_the_slowest_rank() {
    let (_folder, load) = at(&FIVE);
    let synchronous = ranks(2, "async_scheduling = false");
    let (_, ended) = simulate(&synchronous, &load, &Options::default());
    // A's first step ends at 11 ms and B joins the second, until 31 ms. A's last is the fifth, at 61 ms; dummy batches follow, of which
    // the ninth ends at 101 ms. The sixteenth ends at 172 ms. D's wave has one step.
    let expected = [(11, 61), (31, 31), (112, 112), (191, 191), (206, 206)];
    assert_eq!(times(&ended), expected);

    // Each step is decided when the one before it begins.
    let (_, ended) = simulate(&ranks(2, ""), &load, &Options::default());
    // B runs in the third step, 21 to 41 ms; C in the eleventh, from 111 ms. D's wave goes on with dummy batches, as its
    // token was not known when the first step was compared, and E runs in the fourth step, from 211 ms.
    let expected = [(11, 61), (41, 41), (122, 122), (191, 191), (222, 222)];
    assert_eq!(times(&ended), expected);

    // Without the barrier no rank waits.
    let apart = "async_scheduling = false\ndata_parallel_barrier = false";
    let text = |engine: &str| {
        format!(
            "[model]\npreset = \"qwen3-8b\"\n[engine]\nnum_gpu_blocks = 65536\nmax_model_len = 16384\n\
             enable_prefix_caching = false\ndata_parallel_size = 2\n{engine}\n\
             [engine.timing]\nkind = \"linear\"\nbase_ns = 10_000_000\nper_prefill_token_ns = 10_000\n\
             [router]\npolicy = \"round_robin\"\n"
        )
    };
    let (_, ended) = simulate(&cluster(&text(apart)), &load, &Options::default());
    let expected = [(11, 51), (25, 25), (111, 111), (191, 191), (206, 206)];
    assert_eq!(times(&ended), expected);
}

/// Calibrated experts compute the tokens of all ranks: a prompt takes less with idle ranks than with as long ones.
#[test]
fn experts_compute_the_tokens_that_are_there() {
    let with = |barrier: bool| {
        cluster(&format!(
            "[model]\npreset = \"deepseek-v3\"\n[engine]\ndata_parallel_size = 8\nenable_expert_parallel = true\n\
             data_parallel_barrier = {barrier}\n[engine.timing]\ngpu = \"h200-sxm\"\n[router]\npolicy = \"round_robin\"\n"
        ))
    };
    let took = |barrier: bool, requests: &[(u32, u32, u32)]| {
        let (_folder, load) = at(requests);
        let (_, ended) = simulate(&with(barrier), &load, &Options::default());
        ended.iter().map(|e| e.last - e.due).max().unwrap()
    };
    // A step of one rank takes the others to have as many tokens.
    let alone = took(false, &[(0, 4_000, 1)]);
    let beside_idle = took(true, &[(0, 4_000, 1)]);
    let beside_all = took(true, &[(0, 4_000, 1); 8]);
    assert!(
        beside_idle > alone / 5 && beside_idle < alone * 4 / 5,
        "{beside_idle} of {alone}"
    );
    assert!(beside_all.abs_diff(alone) < 10, "{beside_all} of {alone}");
    // Few tokens run in a CUDA graph, padded to the largest rank.
    let [alone, beside_idle] = [false, true].map(|barrier| took(barrier, &[(0, 300, 1)]));
    assert_eq!(alone, beside_idle);
}

/// A rank's scheduler, written without the engine: passes one by one, blocks without end.
#[derive(Default)]
struct Rank {
    waiting: VecDeque<usize>,
    running: Vec<usize>,
}

/// Each request's first and last token by a loop over such ranks, ns. Of a pass: budget, sequences, ns of base, prompt token,
/// decode, and sequence.
fn reference(
    all: &[Ended],
    ranks: usize,
    (budget, sequences): (u32, usize),
    [base, prompt, decode, sequence]: [u64; 4],
) -> Vec<(u64, u64)> {
    let mut left: Vec<(u32, u32)> = all.iter().map(|e| (e.isl, e.osl)).collect();
    let mut times = vec![(0, 0); all.len()];
    let mut group: Vec<Rank> = (0..ranks).map(|_| Rank::default()).collect();
    let (mut next, mut now, mut steps) = (0, 0, 0);
    loop {
        while next < all.len() && all[next].due <= now {
            group[usize::from(all[next].rank)].waiting.push_back(next);
            next += 1;
        }
        let has_work = |r: &Rank| !r.waiting.is_empty() || !r.running.is_empty();
        if !group.iter().any(has_work) && (steps <= 1 || steps % 16 == 0) {
            let Some(request) = all.get(next) else {
                return times;
            };
            (now, steps) = (request.due, 0);
            continue;
        }
        steps += 1;
        let mut longest = 0;
        let mut tokens_of = Vec::new();
        for rank in &mut group {
            let mut room = budget;
            let mut chunks = Vec::new();
            for &request in &rank.running {
                let chunk = left[request].0.max(1).min(room);
                room -= chunk;
                chunks.push((request, chunk));
            }
            while room > 0
                && rank.running.len() < sequences
                && let Some(request) = rank.waiting.pop_front()
            {
                let chunk = left[request].0.min(room);
                room -= chunk;
                rank.running.push(request);
                chunks.push((request, chunk));
            }
            chunks.retain(|&(_, chunk)| chunk > 0);
            let (mut prompts, mut decodes) = (0, 0);
            for &(request, chunk) in &chunks {
                match left[request].0 {
                    0 => decodes += 1,
                    _ => prompts += u64::from(chunk),
                }
            }
            let ns = match chunks.len() as u64 {
                0 => base + decode + sequence,
                count => base + prompt * prompts + decode * decodes + sequence * count,
            };
            longest = longest.max(ns);
            tokens_of.push(chunks);
        }
        now += longest;
        for (rank, chunks) in group.iter_mut().zip(tokens_of) {
            for (request, chunk) in chunks {
                let (isl, osl) = &mut left[request];
                *isl = isl.saturating_sub(chunk);
                if *isl > 0 {
                    continue;
                }
                if *osl == all[request].osl {
                    times[request].0 = now;
                }
                *osl -= 1;
                times[request].1 = now;
            }
            rank.running.retain(|&request| left[request].1 > 0);
        }
    }
}

fn drawn() -> impl Strategy<Value = (u32, u32, u32, Workload)> {
    let arrivals = (5u32..400, 1u32..700, 1u32..60, any::<u32>());
    (2u32..5, 64u32..400, 1u32..12, arrivals).prop_map(
        |(ranks, budget, sequences, (rate, isl, osl, seed))| {
            let load = workload(&format!(
                "seed = {seed}\nrequests = 60\n[arrival]\nkind = \"poisson\"\nrate_per_s = {rate}\n\
                 [[class]]\nisl = {{ kind = \"uniform\", min = 1, max = {isl} }}\n\
                 osl = {{ kind = \"uniform\", min = 1, max = {osl} }}\n"
            ));
            (ranks, budget, sequences, load)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A loop over ranks that was written separately computes the same times to the nanosecond.
    #[test]
    fn times_are_those_of_a_plain_loop((ranks, budget, sequences, load) in drawn()) {
        let cluster = cluster(&format!(
            "[model]\npreset = \"mixtral-8x7b\"\n[engine]\nnum_gpu_blocks = 65536\nmax_model_len = 16384\n\
             enable_prefix_caching = false\nasync_scheduling = false\ndata_parallel_size = {ranks}\n\
             data_parallel_barrier = true\nmax_num_batched_tokens = {budget}\nmax_num_seqs = {sequences}\n\
             [engine.timing]\nkind = \"linear\"\nbase_ns = 5e6\nper_prefill_token_ns = 20_000\n\
             per_decode_token_ns = 150_000\nper_sequence_ns = 30_000\n[router]\npolicy = \"round_robin\"\n"
        ));
        let (_, ended) = simulate(&cluster, &load, &Options::default());
        prop_assert_eq!(ended.len(), 60);
        let limits = (budget, sequences as usize);
        let expected = reference(&ended, ranks as usize, limits, [5_000_000, 20_000, 150_000, 30_000]);
        let found: Vec<_> = ended.iter().map(|e| (e.first, e.last)).collect();
        prop_assert_eq!(found, expected);
    }

    /// All ranks of a worker begin and end their passes at the same times, other workers' do not wait for them, and
    /// neither threads nor records change a run.
    #[test]
    fn ranks_of_a_worker_meet_in_every_pass((ranks, budget, sequences, load) in drawn(), ahead in any::<bool>()) {
        let cluster = cluster(&format!(
            "[model]\npreset = \"mixtral-8x7b\"\n[pool.a]\nworkers = 2\n[pool.b]\n[pool.b.engine]\n\
             data_parallel_size = 1\ndata_parallel_barrier = false\n[engine]\nnum_gpu_blocks = 120\n\
             max_model_len = 1000\nasync_scheduling = {ahead}\ndata_parallel_size = {ranks}\n\
             data_parallel_barrier = true\nmax_num_batched_tokens = {budget}\nmax_num_seqs = {sequences}\n\
             [engine.timing]\nkind = \"linear\"\nbase_ns = 5e6\nper_prefill_token_ns = 20_000\n"
        ));
        let (outcome, ended) = simulate(&cluster, &load, &Options::default());
        let all = [
            Options { threads: 2, ..Options::default() },
            Options { jump: false, ..Options::default() },
            Options { each_token: true, ..Options::default() },
        ];
        for options in &all {
            let (other, same) = simulate(&cluster, &load, options);
            prop_assert_eq!(outcome.digest, other.digest);
            prop_assert_eq!(outcome.totals.latencies(), other.totals.latencies());
            prop_assert_eq!(&ended, &same);
        }
        let mut records = Records { wants_passes: true, ..Records::default() };
        let watched = run(&cluster, &load, &Options::default(), &mut records);
        prop_assert_eq!(outcome.digest, watched.digest);
        for worker in 0..2 {
            let first = &records.passes.get(&(worker * ranks));
            for rank in 1..ranks {
                prop_assert_eq!(first, &records.passes.get(&(worker * ranks + rank)));
            }
        }
    }

    /// Workers that vanish in the middle of a step, or are slow, leave no request behind, also with prompts that other
    /// ranks compute.
    #[test]
    fn faults_end_waves(
        (ranks, budget, sequences, load) in drawn(),
        faults in prop::collection::vec((0u8..4, 1u32..900, 1u32..400), 0..4),
        (apart, ahead) in any::<(bool, bool)>(),
    ) {
        let pools = if apart { APART } else { "[pool.main]\nworkers = 2\n" };
        let mut text = format!(
            "[model]\npreset = \"mixtral-8x7b\"\n{pools}[engine]\nnum_gpu_blocks = 120\n\
             max_model_len = 1000\nasync_scheduling = {ahead}\ndata_parallel_size = {ranks}\nstartup_s = 0.05\n\
             data_parallel_barrier = true\nmax_num_batched_tokens = {budget}\nmax_num_seqs = {sequences}\n\
             [engine.timing]\nkind = \"linear\"\nbase_ns = 5e6\nper_prefill_token_ns = 20_000\n\
             [router]\nremote_prefill_tokens_min = 64\nqueue_max = 100\n"
        );
        for (i, (kind, at_ms, length)) in faults.into_iter().enumerate() {
            let kind = match kind {
                0 => "kind = \"crash\"",
                1 => "kind = \"slow\"\nfactor = 3",
                2 => "kind = \"gpu\"\ndetect_s = 0.0005",
                _ => "kind = \"drain\"",
            };
            let (at, until) = (f64::from(at_ms) / 1e3, f64::from(at_ms + length) / 1e3);
            let worker = i % 2;
            writeln!(text, "[[event]]\n{kind}\nat_s = {at}\nuntil_s = {until}\nworker = {worker}").unwrap();
        }
        let cluster = cluster(&text);
        let with = |each_token: bool| {
            let options = Options { each_token, retries: 9, ..Options::default() };
            run(&cluster, &load, &options, &mut ())
        };
        let (outcome, each) = (with(false), with(true));
        prop_assert_eq!(&outcome.cut, &None);
        let requests = outcome.totals.requests;
        prop_assert_eq!(requests.sent, 60);
        prop_assert_eq!(requests.sent, requests.succeeded + requests.failed);
        prop_assert_eq!(outcome.digest, each.digest);
        prop_assert_eq!(outcome.ended_at, each.ended_at);
    }
}
