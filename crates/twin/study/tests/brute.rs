//! `plan` beside every combination: small questions drawn from a seed, each solved by the search and by simulating the whole
//! grid up to the cost of the answer, with all seeds. Other drawn questions are asked again with fewer values of an axis, for the shape
//! of a row, and under the conditions of the sensitivity: the answers agree.
//!
//! `scripts/run.sh test-plan-release` asks 20 questions of small workloads; with `SLIPSTREAM_BRUTE=200` as many of larger ones, drawn from
//! `SLIPSTREAM_BRUTE_SEED`, such as a commit's hash, and with `SLIPSTREAM_BRUTE=68..71` three of them. It prints the cost and the
//! work of both. With `SLIPSTREAM_BRUTE_QUESTION=FILE` it answers the question of a file, as it prints them.
#![allow(clippy::disallowed_methods, clippy::print_stdout)] // it has files, and prints costs and work

use std::fmt::Write as _;
use std::ops::Range;
use std::path::Path;

use serde_json::Value;
use slipstream_base::mix::{draw, index};
use slipstream_config::cluster::{Cluster, file};
use slipstream_config::doc::Doc;
use slipstream_config::workload_file::Workload;
use slipstream_plan::trial;
use slipstream_plan::{demand, load};
use slipstream_report::Objectives;
use slipstream_study::Control;
use slipstream_study::plan::{Axes, Question};
use slipstream_study::source::{ClusterSource, PriceSource, WorkloadSource};

/// Draws from a list.
struct Draws {
    seed: u64,
    at: u64,
}

impl Draws {
    fn of<T: Clone>(&mut self, values: &[T]) -> T {
        self.at += 1;
        values[index(draw(self.seed, self.at), values.len())].clone()
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.at += 1;
        draw(self.seed, self.at) % 100 < percent
    }

    /// One or two of a list.
    fn some<T: Clone + PartialEq>(&mut self, values: &[T]) -> Vec<T> {
        let first = self.of(values);
        let second = self.of(values);
        if second == first || self.chance(40) {
            vec![first]
        } else {
            vec![first, second]
        }
    }
}

const GPUS: [(&str, f64); 4] = [
    ("h100-sxm", 2.5),
    ("l40s", 0.9),
    ("a100-sxm-80gb", 1.4),
    ("l4", 0.5),
];
const HOST_GIB: f64 = 0.0015;

/// A question of a few hundred combinations. `small`: of at most a few hundred requests.
fn question(seed: u64, small: bool, folder: &Path) -> Question {
    let mut draws = Draws { seed, at: 0 };
    let model = draws.of(&["llama-3.1-8b", "llama-3.1-8b", "qwen3-32b", "qwen3-30b-a3b"]);
    let large = model != "llama-3.1-8b";
    let input = draws.of(&[300, 900, 2500, 6000]);
    let output = draws.of(&[10, 40, 150]);
    let requests = if small {
        draws.of(&[60, 120])
    } else {
        draws.of(&[200, 700, 1500, 2600])
    };
    // About as many tokens per second as some GPUs can take.
    let tokens = draws.of(&[8e3, 2e4, 4e4]) / if large { 4.0 } else { 1.0 };
    let rate = tokens / (f64::from(input) + 8.0 * f64::from(output));
    // Bursts: answers take longer than the requests take to arrive.
    let mut burst = Draws {
        seed: seed ^ 0x6275_7273_7473,
        at: 0,
    };
    let is_burst = burst.chance(30);
    let (output, requests, rate) = if is_burst {
        (
            burst.of(&[400, 1500]),
            burst.of(&[60, 90]),
            rate * burst.of(&[2.0, 8.0]),
        )
    } else {
        (output, requests, rate)
    };
    let hosts = draws.chance(20);
    let trace = !hosts && draws.chance(20);
    let mut kinds = Draws {
        seed: seed ^ 0x006b_696e_6473,
        at: 0,
    };
    let load = Load {
        requests,
        rate,
        input,
        output,
    };
    let has_classes = !trace && kinds.chance(20);
    let workload = if trace {
        let path = folder.join(format!("{seed}.jsonl"));
        std::fs::write(&path, trace_of(&mut draws, requests, rate, input, output)).unwrap();
        WorkloadSource {
            trace: Some(path),
            ..WorkloadSource::default()
        }
    } else {
        let is_open = is_burst || hosts;
        WorkloadSource {
            text: Some(load.file(&mut draws, &mut kinds, hosts, is_open, has_classes)),
            ..WorkloadSource::default()
        }
    };
    let ttft = draws.of(&["300ms", "800ms", "2s", "5s"]);
    let itl = draws.of(&["25ms", "50ms", "100ms"]);
    let slo = match (is_burst, burst.of(&[0, 1, 2])) {
        (true, 0) => format!("tpot={itl}"),
        (true, 1) => format!("e2e={}", burst.of(&["20s", "60s"])),
        _ => format!(
            "ttft={ttft},itl={itl}{}",
            kinds.of(&["", "", ",e2e=8s", ",itl_max=200ms"])
        ),
    };
    let gpus: Vec<(&str, f64)> = draws.some(&GPUS);
    let prices: Vec<String> = gpus
        .iter()
        .map(|(gpu, price)| format!("{gpu}={price}"))
        .collect();
    let mut sets = Vec::new();
    let mut host_memory = Vec::new();
    if hosts {
        sets.push("engine.host_tier.bytes_per_s=25e9".to_owned());
        host_memory = vec![0.0, 256.0];
    }
    let mut speculation = Vec::new();
    if draws.chance(15) {
        sets.extend([
            "engine.speculation.method=\"draft_model\"".to_owned(),
            "engine.speculation.acceptance=[0.7,0.5]".to_owned(),
        ]);
        speculation = vec![0, 2];
    }
    let serving = if draws.chance(35) {
        vec!["aggregated", "disaggregated"]
    } else {
        vec!["aggregated"]
    };
    Question {
        workload,
        slo: (!has_classes).then(|| slo.parse().unwrap()),
        attain: draws.of(&[0.9, 0.95, 0.99]),
        model: Some(model.into()),
        cluster: ClusterSource {
            sets,
            ..ClusterSource::default()
        },
        axes: Axes {
            gpus: gpus.iter().map(|gpu| gpu.0.to_owned()).collect(),
            tensor_parallel: draws.some(&[1, 2, 4]),
            host_memory,
            speculation,
            precision: vec!["fp8".into()],
            serving: serving.into_iter().map(str::to_owned).collect(),
            max_num_seqs: draws.some(&[256, 64, 16]),
            max_num_batched_tokens: draws.some(&[8192, 2048]),
            policies: draws.some(&["kv".to_owned(), "round_robin".into(), "power_of_two".into()]),
            ..Axes::default()
        },
        max_gpus: 12,
        prices: PriceSource {
            text: Some(format!(
                "[prices]\nhost-gib = {HOST_GIB}\n{}\n",
                prices.join("\n").replace('=', " = ")
            )),
            ..PriceSource::default()
        },
        seeds: draws.of(&[1, 3]),
        ..Question::default()
    }
}

/// The size of a generated workload.
#[derive(Clone, Copy)]
struct Load {
    requests: i32,
    rate: f64,
    input: i32,
    output: i32,
}

impl Load {
    /// A workload file. `hosts`: with more prefixes than a GPU holds; `is_open`: as many requests as stated, at their own times.
    fn file(
        self,
        draws: &mut Draws,
        kinds: &mut Draws,
        hosts: bool,
        is_open: bool,
        has_classes: bool,
    ) -> String {
        let Load { requests, rate, .. } = self;
        let arrival = match draws.of(&[0, 1, 2]) {
            0 => format!("kind = \"poisson\"\nrate_per_s = {rate}"),
            1 => format!("kind = \"gamma\"\nrate_per_s = {rate}\ncv = 2"),
            _ => format!("kind = \"constant\"\nrate_per_s = {rate}"),
        };
        let closed = format!("kind = \"closed\"\nconcurrency = {}", kinds.of(&[2, 8, 24]));
        let arrival = if kinds.chance(12) && !is_open {
            closed
        } else {
            arrival
        };
        // Seeds have unequal numbers of requests.
        let length = if kinds.chance(15) && !is_open && !arrival.contains("closed") {
            format!("duration_s = {:.3}", f64::from(requests) / rate)
        } else {
            format!("requests = {requests}")
        };
        let mut text = format!("seed = {}\n{length}\n", draws.of(&[1, 2, 3, 4]));
        let body = self.body(draws, kinds);
        let shared = if hosts || draws.chance(30) {
            let tokens = self.input * 3 / 4;
            let branches = draws.of(&[10, 60, 150]);
            format!("prefix]]\nbranches = {branches}\ntokens = {tokens}\nskew = 0.4\n")
        } else {
            String::new()
        };
        let session = if kinds.chance(15) {
            let turns = kinds.of(&[2, 4]);
            format!("session]\nturns = {turns}\nuser_tokens = 100\nthink_time_s = 1\n")
        } else {
            String::new()
        };
        let tables = |prefix: &str| {
            let table = |text: &str, brackets: &str| {
                let is_empty = text.is_empty();
                (!is_empty).then(|| format!("{brackets}{prefix}{text}"))
            };
            [table(&shared, "[["), table(&session, "[")]
                .into_iter()
                .flatten()
                .collect::<String>()
        };
        if has_classes {
            let other = Load {
                input: kinds.of(&[200, 3000]),
                output: kinds.of(&[20, 80]),
                ..self
            };
            let slo = kinds.of(&["ttft=1s,itl=50ms", "ttft=3s,tpot=80ms", "e2e=6s"]);
            let other_slo = kinds.of(&["ttft=800ms", "e2e=10s", "ttft=5s,itl=100ms"]);
            write!(
                text,
                "[arrival]\n{arrival}\n[[class]]\nweight = {}\nslo = \"{slo}\"\n{body}{}[[class]]\nslo = \"{other_slo}\"\n{}",
                kinds.of(&[1, 4]),
                tables("class."),
                other.body(draws, kinds)
            )
            .unwrap();
        } else {
            write!(text, "{body}[arrival]\n{arrival}\n{}", tables("")).unwrap();
        }
        text
    }

    /// Lengths, and whether answers end where the model ends them.
    fn body(self, draws: &mut Draws, kinds: &mut Draws) -> String {
        let Load { input, output, .. } = self;
        let ends = if kinds.chance(15) {
            "ignore_eos = false\n"
        } else {
            ""
        };
        format!(
            "isl = {{ kind = \"lognormal\", mean = {input}, cv = {}, min = 16, max = 20000 }}\n\
             osl = {{ kind = \"lognormal\", mean = {output}, cv = 0.6, min = 2, max = 1000 }}\n{ends}",
            draws.of(&["0.2", "0.8"]),
        )
    }
}

/// A trace with prompts that share their first blocks.
fn trace_of(draws: &mut Draws, requests: i32, rate: f64, input: i32, output: i32) -> String {
    let mut text = String::new();
    let mut at_s = 0.0;
    for n in 0..requests {
        // Bursts of three.
        at_s += draws.of(&[0.0, 0.5, 2.5]) / rate;
        let blocks = (input * draws.of(&[1, 2, 3]) / 2).max(512) / 512;
        let group = draws.of(&[1, 2, 3, 4, 5, 6, 7, 8]);
        let ids: Vec<String> = (0..blocks)
            .map(|block| {
                let own = block * 2 > blocks;
                let id = if own {
                    1_000_000 + n * 100
                } else {
                    group * 1000
                };
                (id + block).to_string()
            })
            .collect();
        writeln!(
            text,
            "{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": {}, \"hash_ids\": [{}]}}",
            (at_s * 1e3) as u64,
            blocks * 512,
            output * draws.of(&[1, 2]),
            ids.join(", ")
        )
        .unwrap();
    }
    text
}

/// A configuration: its cost, its overrides of the defaults, and what it leaves out of them.
struct Combination {
    cost: f64,
    name: String,
    sets: Vec<String>,
}

/// Every combination of a question.
fn combinations(of: &Question) -> Vec<Combination> {
    let mut all = Vec::new();
    let or_none = |values: &[f64]| -> Vec<Option<f64>> {
        if values.is_empty() {
            vec![None]
        } else {
            values.iter().copied().map(Some).collect()
        }
    };
    let drafts: Vec<Option<u32>> = if of.axes.speculation.is_empty() {
        vec![None]
    } else {
        of.axes.speculation.iter().copied().map(Some).collect()
    };
    for gpu in &of.axes.gpus {
        let price = GPUS.iter().find(|known| known.0 == gpu).unwrap().1;
        for &tensor in &of.axes.tensor_parallel {
            for host in or_none(&of.axes.host_memory) {
                for &draft in &drafts {
                    for serving in &of.axes.serving {
                        for workers in 1..=of.max_gpus / tensor {
                            let splits: Vec<u32> = if serving == "aggregated" {
                                vec![0]
                            } else {
                                (1..workers).collect()
                            };
                            for split in splits {
                                let worker =
                                    price * f64::from(tensor) + HOST_GIB * host.unwrap_or(0.0);
                                let shape = (gpu.as_str(), tensor, host, draft);
                                settings(of, shape, workers, split, worker, &mut all);
                            }
                        }
                    }
                }
            }
        }
    }
    all.sort_by(|a, b| a.cost.total_cmp(&b.cost));
    all
}

fn settings(
    of: &Question,
    (gpu, tensor, host, draft): (&str, u32, Option<f64>, Option<u32>),
    workers: u32,
    split: u32,
    worker: f64,
    all: &mut Vec<Combination>,
) {
    for seqs in &of.axes.max_num_seqs {
        for tokens in &of.axes.max_num_batched_tokens {
            for policy in &of.axes.policies {
                let mut sets = vec![
                    format!("model.preset={}", of.model.as_ref().unwrap()),
                    format!("engine.timing.gpu={gpu}"),
                    "engine.timing.dtype=fp8".into(),
                    format!("engine.tensor_parallel_size={tensor}"),
                    format!("engine.max_num_seqs={seqs}"),
                    format!("engine.max_num_batched_tokens={tokens}"),
                    format!("router.policy={policy}"),
                ];
                if let Some(gib) = host.filter(|gib| *gib > 0.0) {
                    sets.push(format!("engine.host_tier.gib={gib:?}"));
                }
                if let Some(tokens) = draft.filter(|tokens| *tokens > 0) {
                    sets.push(format!(
                        "engine.speculation.num_speculative_tokens={tokens}"
                    ));
                }
                let own = of.cluster.sets.iter().filter(|set| {
                    !(set.contains("host_tier") && host == Some(0.0)
                        || set.contains("speculation") && draft == Some(0))
                });
                sets.extend(own.cloned());
                if split == 0 {
                    sets.push(format!("pool.main.workers={workers}"));
                } else {
                    sets.extend([
                        "network.mode=flows".into(),
                        "pool.prefill.role=prefill".into(),
                        format!("pool.prefill.workers={split}"),
                        "pool.decode.role=decode".into(),
                        format!("pool.decode.workers={}", workers - split),
                    ]);
                }
                let host = host.map_or_else(String::new, |gib| format!(" {gib} GiB"));
                let draft = draft.map_or_else(String::new, |tokens| format!(" spec{tokens}"));
                all.push(Combination {
                    cost: worker * f64::from(workers),
                    name: format!(
                        "{workers} ({split} prefill) x {gpu} TP{tensor}{host}{draft}, {seqs} seqs, {tokens} tokens, {policy}"
                    ),
                    sets,
                });
            }
        }
    }
}

/// Whether a configuration attains in each class on all seeds together, its lowest share, and the requests that were simulated.
fn attains(cluster: &Cluster, workload: &Workload, of: &Question) -> (bool, f64, u64) {
    let objectives = Objectives::of(workload, of.slo.clone());
    let seeds = if of.workload.trace.is_some() {
        1
    } else {
        of.seeds
    };
    let workloads: Vec<Workload> = (0..seeds)
        .map(|seed| Workload {
            seed: workload.seed + seed,
            ..load::scaled(workload, of.load[0])
        })
        .collect();
    let counts: Vec<Vec<u64>> = workloads
        .iter()
        .map(|workload| demand::count(workload).unwrap())
        .collect();
    let allowed = |all: u64| all - ((of.attain * all as f64 - 1e-9).ceil() as u64).min(all);
    let classes = counts.iter().map(Vec::len).max().unwrap();
    let stop_at: Vec<u64> = (0..classes)
        .map(|class| allowed(counts.iter().filter_map(|count| count.get(class)).sum()))
        .collect();
    let mut by_class = vec![(0, 0); classes];
    let mut simulated = 0;
    for (workload, expected) in workloads.iter().zip(&counts) {
        let question = trial::Question {
            objectives: &objectives,
            target: of.attain,
            expected: Some(expected),
            stop_at: Some(&stop_at),
            slower: 1.0,
            length_s: 1.0,
            interrupted: None,
        };
        let answer = trial::run(cluster, workload, &question, |path| std::fs::read(path)).unwrap();
        simulated += answer.measured.requests;
        if !answer.measured.complete {
            return (false, 0.0, simulated);
        }
        for (sum, (all, met)) in by_class.iter_mut().zip(answer.by_class) {
            *sum = (sum.0 + all, sum.1 + met);
        }
    }
    let share = by_class
        .iter()
        .filter(|class| class.0 > 0)
        .map(|&(all, met)| met as f64 / all as f64)
        .fold(1.0, f64::min);
    let attained = by_class.iter().all(|&(all, met)| all - met <= allowed(all));
    (attained, share, simulated)
}

impl Combination {
    /// Its cluster; `None` if it cannot run.
    fn cluster(&self) -> Option<Cluster> {
        let mut doc = Doc::empty();
        for set in &self.sets {
            doc.set(set);
        }
        let read = file::read(doc, |path: &Path| std::fs::read(path));
        read.ok().map(|(cluster, _)| cluster)
    }
}

/// The cheapest combination, the number of them that were tried, and the requests that were simulated. Combinations of `limit` and
/// above are not tried.
fn brute(of: &Question, limit: f64) -> (Option<(f64, String, f64)>, u64, u64) {
    let (workload, _) = of.workload.workload(&[]).unwrap();
    let (mut tried, mut simulated) = (0, 0);
    for each in combinations(of) {
        if each.cost >= limit * (1.0 - 1e-9) {
            break;
        }
        let Some(cluster) = each.cluster() else {
            continue;
        };
        let (attained, share, requests) = attains(&cluster, &workload, of);
        tried += 1;
        simulated += requests;
        if attained {
            return (Some((each.cost, each.name, share)), tried, simulated);
        }
    }
    (None, tried, simulated)
}

/// Whether an answer attains as it says, if it is simulated again.
fn is_right(of: &Question, answer: &Value) -> bool {
    let row = &answer["answer"];
    let text = |key: &str| row[key].as_str().unwrap().to_owned();
    let host = row["host_memory_gib"].as_f64();
    let draft = row["draft_tokens"].as_u64();
    let name = format!(
        "{} ({} prefill) x {} TP{}{}{}, {} seqs, {} tokens, {}",
        row["workers"],
        row["prefill_workers"].as_u64().unwrap_or(0),
        text("gpu"),
        row["tensor_parallel_size"],
        host.map_or_else(String::new, |gib| format!(" {gib} GiB")),
        draft.map_or_else(String::new, |tokens| format!(" spec{tokens}")),
        row["max_num_seqs"],
        row["max_num_batched_tokens"],
        text("policy"),
    );
    let all = combinations(of);
    let Some(own) = all.iter().find(|each| each.name == name) else {
        panic!("{name} is none of the combinations");
    };
    let (workload, _) = of.workload.workload(&[]).unwrap();
    let (attained, share, _) = attains(&own.cluster().unwrap(), &workload, of);
    let said = row["attained"].as_f64().unwrap();
    if !attained || (share - said).abs() > 1e-9 {
        println!("    WRONG: {name} attains {share:.4}, not {said:.4}");
    }
    attained && (share - said).abs() <= 1e-9
}

/// The answer as JSON; `Null` if there is none.
fn plan(of: &Question) -> Option<Value> {
    let plan = of.prepare().ok()?;
    let answer = plan.answer(Some(1), &Control::default(), None).unwrap();
    let json: Value = serde_json::from_str(&answer.json().unwrap()).unwrap();
    Some(json["answers"][0].clone())
}

fn cost(answer: &Value) -> f64 {
    answer["answer"]["cost_per_hour"]
        .as_f64()
        .unwrap_or(f64::INFINITY)
}

/// The seed of the environment: a number, or a commit's hash.
fn seed() -> u64 {
    let text = std::env::var("SLIPSTREAM_BRUTE_SEED").unwrap_or_else(|_| "1".into());
    let digits: String = text.chars().take(15).collect();
    u64::from_str_radix(&digits, 16).expect("a number, or a commit's hash")
}

/// The numbers of the questions that are asked, and whether they are small ones.
fn numbers() -> (Range<u64>, bool) {
    let asked = std::env::var("SLIPSTREAM_BRUTE").ok();
    let number = |text: &str| text.parse::<u64>().expect("a count, or FROM..TO");
    match asked
        .as_deref()
        .map(|text| text.split_once("..").ok_or(text))
    {
        None => (0..20, true),
        Some(Ok((from, to))) => (number(from)..number(to), false),
        Some(Err(count)) => (0..number(count), false),
    }
}

/// Answers the question of a file.
fn ask_again(file: &Path) {
    let question: Question = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let plan = question.prepare().unwrap();
    let answer = plan.answer(Some(1), &Control::default(), None).unwrap();
    println!("{}", answer.text(None));
}

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "takes minutes without optimization: scripts/run.sh test-plan-release"
)]
fn answers_are_those_of_every_combination() {
    if let Ok(file) = std::env::var("SLIPSTREAM_BRUTE_QUESTION") {
        return ask_again(Path::new(&file));
    }
    let (range, small) = numbers();
    let count = range.end - range.start;
    let folder = tempfile::tempdir().unwrap();
    let (mut dearer, mut found, mut none, mut refused) = (Vec::new(), 0, 0, 0);
    let (mut planned, mut simulated, mut proven) = (0, 0, 0);
    for n in range {
        let seed = draw(seed(), n);
        let question = Question {
            quick: true,
            ..question(seed, small, folder.path())
        };
        let Some(answer) = plan(&question) else {
            refused += 1;
            continue;
        };
        let cost = cost(&answer);
        let (cheapest, tried, requests) = brute(&question, cost);
        let work = answer["simulated_requests"].as_u64().unwrap_or(0);
        planned += work;
        simulated += requests;
        let is_proven = answer["proven"].as_bool().unwrap();
        proven += u64::from(is_proven);
        let mut is_wrong = false;
        if cost.is_finite() {
            found += 1;
            is_wrong = !is_right(&question, &answer);
        } else {
            none += 1;
        }
        println!(
            "{n:3} {seed:016x}: plan {cost:.3} with {work} requests{}, {}; {tried} cheaper combinations with {requests}{}",
            if is_proven { ", proven" } else { "" },
            answer["answer"]["name"],
            cheapest
                .as_ref()
                .map_or_else(String::new, |(cost, name, share)| format!(
                    "; DEARER: {name} for {cost:.3} attains {share:.4} of {}",
                    question.attain
                ))
        );
        if cheapest.is_some() || is_wrong {
            println!("    {}", question.travelling().unwrap());
            dearer.push(n);
        }
    }
    println!(
        "{count} questions: {found} answers, {none} without, {refused} that cannot run; {proven} proven; {} dearer: {dearer:?}; \
         {planned} requests by plan, {simulated} to try what is cheaper than its answers",
        dearer.len()
    );
    if !dearer.is_empty() {
        println!("traces are kept in {}", folder.keep().display());
    }
    assert!(dearer.is_empty(), "{dearer:?}");
    assert!(found * 2 > count, "{found} of {count} have an answer");
}

/// An axis of the space: gives it several values, and one of them.
struct AxisCase {
    name: &'static str,
    widen: fn(&mut Question),
    narrow: fn(&mut Draws, &mut Question),
}

/// Keeps one value of a list.
fn keep_one<T: Clone>(draws: &mut Draws, values: &mut Vec<T>) {
    *values = vec![draws.of(values)];
}

/// Adds what an axis needs to the settings that are not searched.
fn set(of: &mut Question, sets: &[&str]) {
    for set in sets {
        if !of.cluster.sets.iter().any(|own| own == set) {
            of.cluster.sets.push((*set).to_owned());
        }
    }
}

/// Policies with `kv` among them, which reads weights and temperatures.
fn with_kv(of: &mut Question) {
    if !of.axes.policies.iter().any(|policy| policy == "kv") {
        of.axes.policies.push("kv".to_owned());
    }
}

const AXIS_CASES: [AxisCase; 15] = [
    AxisCase {
        name: "gpus",
        widen: |of| of.axes.gpus = vec!["l40s".into(), "h100-sxm".into()],
        narrow: |draws, of| keep_one(draws, &mut of.axes.gpus),
    },
    AxisCase {
        name: "tensor_parallel",
        widen: |of| of.axes.tensor_parallel = vec![1, 2, 4],
        narrow: |draws, of| keep_one(draws, &mut of.axes.tensor_parallel),
    },
    AxisCase {
        name: "pipeline_parallel",
        widen: |of| of.axes.pipeline_parallel = vec![1, 2],
        narrow: |draws, of| keep_one(draws, &mut of.axes.pipeline_parallel),
    },
    AxisCase {
        name: "data_parallel",
        widen: |of| of.axes.data_parallel = vec![1, 2],
        narrow: |draws, of| keep_one(draws, &mut of.axes.data_parallel),
    },
    AxisCase {
        name: "precision",
        widen: |of| of.axes.precision = vec!["bf16".into(), "fp8".into()],
        narrow: |draws, of| keep_one(draws, &mut of.axes.precision),
    },
    AxisCase {
        name: "kv_cache_dtype",
        widen: |of| of.axes.kv_cache_dtype = vec!["auto".into(), "fp8".into()],
        narrow: |draws, of| keep_one(draws, &mut of.axes.kv_cache_dtype),
    },
    AxisCase {
        name: "host_memory",
        widen: |of| {
            set(of, &["engine.host_tier.bytes_per_s=25e9"]);
            of.axes.host_memory = vec![0.0, 256.0];
        },
        narrow: |draws, of| keep_one(draws, &mut of.axes.host_memory),
    },
    AxisCase {
        name: "speculation",
        widen: |of| {
            set(
                of,
                &[
                    "engine.speculation.method=\"draft_model\"",
                    "engine.speculation.acceptance=[0.7,0.5]",
                ],
            );
            of.axes.speculation = vec![0, 2];
        },
        narrow: |draws, of| keep_one(draws, &mut of.axes.speculation),
    },
    AxisCase {
        name: "serving",
        widen: |of| of.axes.serving = vec!["aggregated".into(), "disaggregated".into()],
        narrow: |draws, of| keep_one(draws, &mut of.axes.serving),
    },
    AxisCase {
        name: "max_num_seqs",
        widen: |of| of.axes.max_num_seqs = vec![64, 16],
        narrow: |draws, of| keep_one(draws, &mut of.axes.max_num_seqs),
    },
    AxisCase {
        name: "max_num_batched_tokens",
        widen: |of| of.axes.max_num_batched_tokens = vec![8192, 512],
        narrow: |draws, of| keep_one(draws, &mut of.axes.max_num_batched_tokens),
    },
    AxisCase {
        name: "policies",
        widen: |of| {
            of.axes.policies = vec!["round_robin".into(), "power_of_two".into(), "kv".into()];
        },
        narrow: |draws, of| keep_one(draws, &mut of.axes.policies),
    },
    AxisCase {
        name: "prefill_weights",
        widen: |of| {
            with_kv(of);
            of.axes.prefill_weights = vec![1.0, 4.0];
        },
        narrow: |draws, of| keep_one(draws, &mut of.axes.prefill_weights),
    },
    AxisCase {
        name: "temperatures",
        widen: |of| {
            with_kv(of);
            of.axes.temperatures = vec![0.0, 0.5];
        },
        narrow: |draws, of| keep_one(draws, &mut of.axes.temperatures),
    },
    AxisCase {
        name: "max_gpus",
        widen: |of| of.max_gpus = 12,
        narrow: |_, of| of.max_gpus = 8,
    },
];

/// Every axis alone, and every pair of axes.
fn axes_and_pairs() -> Vec<Vec<&'static AxisCase>> {
    let alone = AXIS_CASES.iter().map(|axis| vec![axis]);
    let pairs = AXIS_CASES.iter().enumerate().flat_map(|(at, first)| {
        AXIS_CASES[at + 1..]
            .iter()
            .map(move |second| vec![first, second])
    });
    alone.chain(pairs).collect()
}

/// The question for the shape of a row alone.
fn of_row(wide: &Question, row: &Value) -> Question {
    let number = |key: &str| row[key].as_u64().map(|n| u32::try_from(n).unwrap());
    let serving = if row["prefill_workers"].is_null() {
        "aggregated"
    } else {
        "disaggregated"
    };
    let mut of = Question {
        axes: Axes {
            gpus: vec![row["gpu"].as_str().unwrap().to_owned()],
            tensor_parallel: vec![number("tensor_parallel_size").unwrap()],
            serving: vec![serving.to_owned()],
            ..wide.axes.clone()
        },
        quick: true,
        ..wide.clone()
    };
    if let Some(gib) = row["host_memory_gib"].as_f64() {
        of.axes.host_memory = vec![gib];
    }
    if let Some(tokens) = number("draft_tokens") {
        of.axes.speculation = vec![tokens];
    }
    if !of.axes.pipeline_parallel.is_empty() {
        of.axes.pipeline_parallel = vec![number("pipeline_parallel_size").unwrap()];
    }
    of
}

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "takes minutes without optimization: scripts/run.sh test-plan-release"
)]
fn a_wider_search_is_never_dearer() {
    let (range, _) = numbers();
    let folder = tempfile::tempdir().unwrap();
    let mut faults: Vec<String> = Vec::new();
    let (mut asked, mut found) = (0, 0);
    for n in range {
        let seed = draw(seed() ^ 0x77_6964_6572, n);
        let mut draws = Draws {
            seed: seed ^ 1,
            at: 0,
        };
        let mut wide = Question {
            quick: true,
            ..question(seed, true, folder.path())
        };
        // Each case in turn, from one that is drawn.
        let cases = axes_and_pairs();
        let first = index(draw(self::seed(), 0), cases.len());
        let case = &cases[(first + usize::try_from(n).unwrap()) % cases.len()];
        for axis in case {
            (axis.widen)(&mut wide);
        }
        let mut narrow = wide.clone();
        for axis in case {
            (axis.narrow)(&mut draws, &mut narrow);
        }
        let names: Vec<&str> = case.iter().map(|axis| axis.name).collect();
        let axis = names.join(" and of ");
        let (Some(wider), Some(narrower)) = (plan(&wide), plan(&narrow)) else {
            continue;
        };
        asked += 1;
        found += u64::from(cost(&wider).is_finite());
        if cost(&wider) > cost(&narrower) * (1.0 + 1e-9) {
            faults.push(format!(
                "{n}: {} for {:.3}, but {} for {:.3} with one value of {axis}: {}",
                wider["answer"]["name"],
                cost(&wider),
                narrower["answer"]["name"],
                cost(&narrower),
                narrow.travelling().unwrap()
            ));
            println!("{}", faults[faults.len() - 1]);
        }
    }
    println!(
        "{asked} questions, {found} answers, {} dearer than a narrower one",
        faults.len()
    );
    assert!(faults.is_empty(), "{faults:#?}");
}

/// No row is cheaper than the answer, a row is the answer to a question for its shape alone, and a changed condition is answered as if
/// asked about.
#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "takes minutes without optimization: scripts/run.sh test-plan-release"
)]
fn rows_are_the_answers_to_their_own_questions() {
    let (range, _) = numbers();
    let folder = tempfile::tempdir().unwrap();
    let mut faults: Vec<String> = Vec::new();
    let (mut rows, mut changes) = (0, 0);
    for n in range {
        let seed = draw(seed() ^ 0x726f_7773, n);
        let mut draws = Draws {
            seed: seed ^ 1,
            at: 0,
        };
        let of = question(seed, true, folder.path());
        let Some(answer) = plan(&of).filter(|answer| cost(answer).is_finite()) else {
            continue;
        };
        let others = answer["others"].as_array().unwrap();
        let name = |value: &Value| value["name"].as_str().unwrap_or("nothing").to_owned();
        let cost_of = |value: &Value| value["cost_per_hour"].as_f64().unwrap_or(f64::INFINITY);
        for other in others {
            if cost_of(other) < cost(&answer) * (1.0 - 1e-9) {
                faults.push(format!("{n}: the row {} is cheaper", name(other)));
            }
        }
        if !others.is_empty() {
            let row = draws.of(others);
            let own = plan(&of_row(&of, &row)).unwrap();
            rows += 1;
            if (cost(&own) - cost_of(&row)).abs() > 1e-9 {
                faults.push(format!(
                    "{n}: the row {} for {:.3}, but {} for {:.3} if asked alone: {}",
                    name(&row),
                    cost_of(&row),
                    name(&own["answer"]),
                    cost(&own),
                    of.travelling().unwrap()
                ));
            }
        }
        for (changed, load) in [
            ("the load is 20 % lower", 0.8),
            ("the load is 20 % higher", 1.2),
        ] {
            let each = answer["sensitivity"].as_array().unwrap();
            let row = each.iter().find(|row| row["changed"] == changed).unwrap();
            let direct = plan(&Question {
                load: vec![load],
                quick: true,
                ..of.clone()
            })
            .unwrap();
            changes += 1;
            if cost_of(&row["answer"]) != cost(&direct) {
                faults.push(format!(
                    "{n}: if {changed}: {} for {:.3}, but {:.3} if asked: {}",
                    name(&row["answer"]),
                    cost_of(&row["answer"]),
                    cost(&direct),
                    of.travelling().unwrap()
                ));
            }
        }
    }
    println!(
        "{rows} rows, {changes} changed conditions, {} faults",
        faults.len()
    );
    for fault in &faults {
        println!("{fault}");
    }
    assert!(faults.is_empty(), "{} faults", faults.len());
    assert!(rows > 0 && changes > 0);
}
