//! `slipstream plan`: its answer holds in `slipstream simulate`, and is that of every combination.

use serde_json::Value;
use slipstream_base::mix::mix64;

use crate::server::run;

/// A model that fits one GPU, and a load that takes a few of them.
const LOAD: &[&str] = &[
    "--model=llama-3.1-8b",
    "--rate=30",
    "--isl=1200",
    "--osl=40",
    "--requests=240",
    "--seeds=1",
    "--quiet",
];

/// A space that can be searched in whole: two sizes, two settings.
const SMALL: &[&str] = &[
    "--gpus=l40s",
    "--precision=bf16",
    "--tensor-parallel=1,2",
    "--serving=aggregated",
    "--max-num-seqs=256,8",
    "--max-num-batched-tokens=8192",
    "--policies=kv",
    "--slo=ttft=600ms,itl=60ms",
    "--attain=95%",
];

fn plan(args: &[&[&str]]) -> (Option<i32>, Value, String) {
    let mut all = vec!["plan", "--json"];
    all.extend(args.concat());
    let (code, out, err) = run(&all);
    let json = serde_json::from_str(&out).unwrap_or(Value::Null);
    (code, json, err)
}

fn gpus(json: &Value) -> u64 {
    json["answers"][0]["answer"]["gpus"]
        .as_u64()
        .expect("an answer")
}

#[test]
fn the_written_cluster_attains_as_claimed() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = dir.path().join("cluster.toml");
    let write = format!("--write={}", cluster.display());
    let (code, json, err) = plan(&[LOAD, SMALL, &["--quick", &write]]);
    assert_eq!(code, Some(0), "{err}");
    let answer = &json["answers"][0]["answer"];
    assert!(answer["attained"].as_f64().unwrap() >= 0.95, "{answer}");

    let (code, out, err) = run(&[
        "simulate",
        cluster.to_str().unwrap(),
        "--rate=30",
        "--isl=1200",
        "--osl=40",
        "--requests=240",
        "--slo=ttft=600ms,itl=60ms",
        "--json",
        "--quiet",
    ]);
    assert_eq!(code, Some(0), "{err}");
    let run: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(run["goodput"]["share"], answer["attained"]);
    assert_eq!(run["simulation"]["digest"], answer["digest"]);
    assert_eq!(run["gpu"]["gpus"], answer["gpus"]);
}

#[test]
fn the_answer_is_that_of_every_combination() {
    let (code, json, err) = plan(&[LOAD, SMALL, &["--quick"]]);
    assert_eq!(code, Some(0), "{err}");
    let answer = gpus(&json);
    // The same space by `sweep`, every size up to the answer's cost.
    let (mut least, mut runs) = (u64::MAX, 0);
    for tp in [1, 2] {
        let (code, out, err) = run(&[
            "sweep",
            "--set=model.preset=llama-3.1-8b",
            "--set=engine.timing.gpu=l40s",
            "--set=engine.timing.dtype=bf16",
            &format!("--set=engine.tensor_parallel_size={tp}"),
            &format!("--vary=pool.main.workers=1..{}", answer / tp),
            "--vary=engine.max_num_seqs=256,8",
            "--rate=30",
            "--isl=1200",
            "--osl=40",
            "--requests=240",
            "--slo=ttft=600ms,itl=60ms",
            "--attain=95%",
            "--quiet",
        ]);
        assert_eq!(code, Some(0), "{err}");
        for line in out.lines() {
            let cells: Vec<&str> = line.split_whitespace().collect();
            let Some(workers) = cells.first().and_then(|cell| cell.parse::<u64>().ok()) else {
                continue;
            };
            runs += 1;
            if cells.contains(&"yes") {
                least = least.min(workers * tp);
            }
        }
    }
    assert!(runs > 6, "{runs}");
    assert_eq!(answer, least);
}

/// Questions drawn from a seed: the lowest cost is that of a sweep over every combination up to it, on workloads
/// long enough that most trials run on parts of them.
#[test]
fn answers_of_random_questions_are_those_of_every_combination() {
    let mut state = 0u64;
    let mut draw = |values: &[&str]| {
        state += 1;
        let at = mix64(state) % values.len() as u64;
        values[at as usize].to_owned()
    };
    let mut judged = 0;
    for _ in 0..6 {
        let load = [
            format!("--rate={}", draw(&["12", "25", "40"])),
            format!("--isl={}", draw(&["500", "1200", "2500"])),
            format!("--osl={}", draw(&["20", "50"])),
            "--requests=700".into(),
            format!(
                "--slo=ttft={},itl={}",
                draw(&["250ms", "600ms", "2s"]),
                draw(&["30ms", "60ms", "120ms"])
            ),
            format!("--attain={}", draw(&["90%", "95%", "99%"])),
            "--quiet".into(),
        ];
        let load: Vec<&str> = load.iter().map(String::as_str).collect();
        let space = [
            "--model=llama-3.1-8b",
            "--gpus=l40s",
            "--precision=bf16",
            "--tensor-parallel=1,2",
            "--serving=aggregated",
            "--max-num-seqs=256,8",
            "--max-num-batched-tokens=8192",
            "--policies=kv,round_robin",
            "--max-gpus=12",
            "--seeds=1",
            "--quick",
        ];
        let (code, json, err) = plan(&[&load, &space]);
        assert!(code == Some(0) || code == Some(1), "{err}");
        // If nothing attains, no combination does.
        let answer = (code == Some(0)).then(|| gpus(&json));
        let mut least = None;
        for tp in [1, 2] {
            let workers = format!("--vary=pool.main.workers=1..{}", answer.unwrap_or(12) / tp);
            if answer.unwrap_or(12) < tp {
                continue;
            }
            let size = format!("--set=engine.tensor_parallel_size={tp}");
            let sweep = [
                "sweep",
                "--set=model.preset=llama-3.1-8b",
                "--set=engine.timing.gpu=l40s",
                "--set=engine.timing.dtype=bf16",
                &size,
                &workers,
                "--vary=engine.max_num_seqs=256,8",
                "--vary=router.policy=kv,round_robin",
            ];
            let (code, out, err) = run(&[&sweep[..], &load].concat());
            assert_eq!(code, Some(0), "{err}");
            for line in out.lines() {
                let cells: Vec<&str> = line.split_whitespace().collect();
                let workers = cells.first().and_then(|cell| cell.parse::<u64>().ok());
                if let Some(workers) = workers
                    && cells.contains(&"yes")
                {
                    least = Some(least.unwrap_or(u64::MAX).min(workers * tp));
                }
            }
        }
        assert_eq!(answer, least, "{load:?}");
        judged += u32::from(answer.is_some_and(|gpus| gpus > 1));
    }
    assert!(
        judged >= 3,
        "{judged} of 6 questions need more than one GPU"
    );
}

#[test]
fn the_answer_does_not_depend_on_threads() {
    let (_, one, err) = plan(&[LOAD, SMALL, &["--jobs=1"]]);
    let (_, four, _) = plan(&[LOAD, SMALL, &["--jobs=4"]]);
    assert!(one["answers"][0]["found"] == true, "{err}");
    assert_eq!(one, four);
}

#[test]
fn harder_questions_are_not_cheaper() {
    let (code, json, err) = plan(&[LOAD, SMALL, &["--quick", "--load=0.5,1,2"]]);
    assert_eq!(code, Some(0), "{err}");
    let costs: Vec<u64> = (0..3)
        .map(|at| json["answers"][at]["answer"]["gpus"].as_u64().unwrap())
        .collect();
    assert!(costs.is_sorted() && costs[0] < costs[2], "{costs:?}");
    let base = costs[1];
    for (tighter, looser) in [
        (&["--attain=99%"][..], &["--attain=80%"][..]),
        (&["--headroom=50%"], &["--headroom=0%"]),
        (&["--slo=ttft=300ms,itl=40ms"], &["--slo=ttft=3s,itl=120ms"]),
    ] {
        // The last of two equal flags would be an error, so these replace those of SMALL.
        let space: Vec<&str> = SMALL
            .iter()
            .copied()
            .filter(|flag| !tighter[0].starts_with(flag.split('=').next().unwrap()))
            .collect();
        let cost = |more: &[&str]| {
            let (code, json, err) = plan(&[LOAD, &space, &["--quick"], more]);
            assert_eq!(code, Some(0), "{err}");
            gpus(&json)
        };
        assert!(cost(tighter) >= base && base >= cost(looser), "{tighter:?}");
    }
}

#[test]
fn prices_decide_among_kinds() {
    let space = [
        "--precision=bf16",
        "--tensor-parallel=1",
        "--serving=aggregated",
        "--max-num-seqs=256",
        "--max-num-batched-tokens=8192",
        "--policies=kv",
        "--slo=ttft=2s,itl=100ms",
        "--gpus=h100-sxm,l40s",
        "--quick",
    ];
    let with = |prices: &[&str]| {
        let (code, json, err) = plan(&[LOAD, &space, prices]);
        assert_eq!(code, Some(0), "{err}");
        json["answers"][0]["answer"].clone()
    };
    let cheap_l40s = with(&["--price=h100-sxm=100", "--price=l40s=0.1"]);
    assert_eq!(cheap_l40s["gpu"], "l40s");
    let cheap_h100 = with(&["--price=h100-sxm=0.1", "--price=l40s=100"]);
    assert_eq!(cheap_h100["gpu"], "h100-sxm");
    let cost = cheap_h100["cost_per_hour"].as_f64().unwrap();
    let gpus = cheap_h100["gpus"].as_f64().unwrap();
    assert!((cost - 0.1 * gpus).abs() < 1e-9);
    // Per million tokens: cost per hour over tokens per hour.
    let rate = cheap_h100["output_tokens_per_s"].as_f64().unwrap();
    let per_million = cheap_h100["cost_per_million_output_tokens"]
        .as_f64()
        .unwrap();
    assert!((per_million - cost / (rate * 3600.0) * 1e6).abs() < 1e-9 * per_million);
    assert_eq!(cheap_h100["power_w_max"].as_f64(), Some(700.0 * gpus));
    // Without prices, fewer GPUs are better, and no price is invented.
    let fewest = with(&[]);
    assert_eq!(fewest["gpu"], "h100-sxm");
    assert_eq!(fewest["cost_per_hour"], Value::Null);

    let (code, _, err) = plan(&[LOAD, &space, &["--price=l40s=1"]]);
    assert_eq!(code, Some(2));
    assert!(err.contains("h100-sxm has no price"), "{err}");
    let (code, _, err) = plan(&[LOAD, &space, &["--price=l40x=1"]]);
    assert_eq!(code, Some(2));
    assert!(err.contains("l40x"), "{err}");
}

/// No request of few misses its objectives: that is no proof that none will.
#[test]
fn attaining_without_a_miss_has_an_interval_with_a_width() {
    let (code, json, err) = plan(&[ONE, &["--model=llama-3.1-8b", "--tensor-parallel=1"]]);
    assert_eq!(code, Some(0), "{err}");
    let answer = &json["answers"][0];
    assert_eq!(answer["answer"]["attained"], 1.0);
    let interval = &answer["interval"];
    // 80 requests in 20 parts: n / (n + t²), with t(19) = 2.093.
    let low = 80.0 / (80.0 + 2.093f64.powi(2));
    assert!(
        (interval["low"].as_f64().unwrap() - low).abs() < 1e-9,
        "{interval}"
    );
    assert_eq!(interval["high"], 1.0);
    let flags = ["plan", "--model=llama-3.1-8b", "--tensor-parallel=1"];
    let (_, out, err) = run(&[&flags[..], ONE].concat());
    assert!(
        out.contains("attained 100.0 % (95 % interval 94.8 to 100.0 %, 20 parts of the run)"),
        "{out}{err}"
    );
}

/// Two clusters for the price of two GPUs: the one without a transfer of KV caches is the answer.
#[test]
fn of_equal_cost_a_cluster_of_one_kind_of_workers_is_preferred() {
    let flags = [
        "--model=llama-3.1-8b",
        "--gpus=h100-sxm",
        "--precision=fp8",
        "--tensor-parallel=1",
        "--rate=18",
        "--isl=2000",
        "--osl=200",
        "--requests=700",
        "--seeds=1",
        "--max-num-seqs=256",
        "--max-num-batched-tokens=8192",
        "--policies=kv",
        "--slo=ttft=1s,itl=30ms",
        "--quick",
        "--quiet",
    ];
    let answer = |serving: &str| {
        let (code, json, err) = plan(&[&flags, &[serving]]);
        assert_eq!(code, Some(0), "{err}");
        json["answers"][0]["answer"].clone()
    };
    // Either kind would do.
    assert_eq!(answer("--serving=disaggregated")["gpus"], 2);
    assert_eq!(answer("--serving=aggregated")["gpus"], 2);
    for serving in ["disaggregated,aggregated", "aggregated,disaggregated"] {
        let both = answer(&format!("--serving={serving}"));
        assert_eq!(
            (&both["gpus"], &both["prefill_workers"]),
            (&2.into(), &Value::Null)
        );
    }
}

/// Mistakes of the question are found before the search.
#[test]
fn files_and_profiles_are_checked_before_the_search() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(at("bad.profile"), "junk\n").unwrap();
    let folder = at("");
    for (flags, parts) in [
        (
            vec![format!("--write={}", at("none/plan.toml"))],
            ["there is no folder", "none; create it"],
        ),
        (
            vec![format!("--html={}", at("none/plan.html"))],
            ["--html", "there is no folder"],
        ),
        (
            vec![format!("--write={folder}")],
            ["that is a folder", "name a file"],
        ),
        (
            vec![format!(
                "--set=engine.timing.profile={}",
                at("none.profile")
            )],
            ["none.profile: No such file", "slipstream calibrate"],
        ),
        (
            vec![format!("--set=engine.timing.profile={}", at("bad.profile"))],
            ["`engine.timing.profile`", "bad.profile: line 1"],
        ),
        (
            vec!["--set=prices.h100-sxm=2".into()],
            ["no part of a cluster file", "--price h100-sxm=2"],
        ),
        (
            vec!["--headroom".into(), "-5%".into()],
            ["--headroom is -5.00 %", "0 to 1,000 %"],
        ),
        (
            vec!["--attain".into(), "-5%".into()],
            ["--attain is -5.00 %", "above 0"],
        ),
    ] {
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let base = ["plan", "--model=llama-3.1-8b", "--rate=2", "--slo=ttft=5s"];
        let (code, out, err) = run(&[&base[..], &flags].concat());
        assert_eq!(code, Some(2), "{flags:?}: {out}{err}");
        for part in parts {
            assert!(err.contains(part), "{flags:?}: {err}");
        }
        assert!(!err.contains("pool"), "the question has no pool: {err}");
    }
}

#[test]
fn an_impossible_objective_is_explained() {
    let mut args = vec!["plan"];
    args.extend(LOAD);
    args.extend(SMALL.iter().filter(|flag| !flag.starts_with("--slo")));
    args.push("--slo=ttft=1us,itl=60ms");
    let (code, out, err) = run(&args);
    assert_eq!(code, Some(1), "{err}");
    for part in ["nothing attains", "ttft 0.0 %", "itl 100.0 %", "TTFT of"] {
        assert!(out.contains(part), "{part}: {out}");
    }
    // Possible on an idle cluster, and not with so few GPUs.
    let (code, json, err) = plan(&[LOAD, SMALL, &["--max-gpus=1"]]);
    assert_eq!(code, Some(1), "{err}");
    let missed = &json["answers"][0];
    assert_eq!(missed["found"], false);
    assert!(
        missed["nearest"]["attained"].as_f64().unwrap() < 0.95,
        "{missed}"
    );
    let objectives = missed["nearest"]["objectives"].as_array().unwrap();
    assert_eq!(objectives.len(), 2, "{missed}");
}

#[test]
fn a_model_that_needs_several_gpus_gets_them() {
    let common = [
        "--gpus=h100-sxm",
        "--rate=1",
        "--isl=500",
        "--osl=20",
        "--requests=40",
        "--serving=aggregated",
        "--max-num-seqs=64",
        "--max-num-batched-tokens=8192",
        "--policies=kv",
        "--slo=ttft=5s",
        "--precision=bf16",
        "--quick",
        "--quiet",
        "--seeds=1",
        "--model=llama-3.1-70b",
    ];
    let (code, json, err) = plan(&[&common]);
    assert_eq!(code, Some(0), "{err}");
    assert!(gpus(&json) >= 2, "140 GB of weights");
    let not_searched = json["not_searched"].as_array().unwrap();
    assert!(
        not_searched
            .iter()
            .any(|shape| shape["name"] == "h100-sxm TP1 bf16"
                && shape["reason"].as_str().unwrap().contains("141")),
        "{not_searched:?}"
    );
    let (code, _, err) = plan(&[&common, &["--tensor-parallel=1"]]);
    assert_eq!(code, Some(2));
    assert!(
        err.contains("cannot run on any") && err.contains("weights"),
        "{err}"
    );
}

#[test]
fn traces_of_one_request_and_of_none_are_handled() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("one.jsonl");
    let line =
        "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [1, 2]}\n";
    std::fs::write(&trace, line).unwrap();
    let rest = [
        "--model=llama-3.1-8b",
        "--gpus=l40s",
        "--slo=ttft=5s",
        "--quick",
        "--quiet",
    ];
    let (code, json, err) = plan(&[&[trace.to_str().unwrap()], &rest]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(gpus(&json), 1);
    assert_eq!(json["answers"][0]["interval"]["half"], Value::Null);
    std::fs::write(&trace, "").unwrap();
    let (code, _, err) = plan(&[&[trace.to_str().unwrap()], &rest]);
    assert_eq!(code, Some(2));
    assert!(err.contains("no request"), "{err}");
    let (code, _, err) = plan(&[&["/no/such/trace.jsonl"], &rest]);
    assert_eq!(code, Some(2));
    assert!(err.contains("/no/such/trace.jsonl"), "{err}");
}

#[test]
fn a_workers_for_prompts_and_workers_for_answers_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = dir.path().join("cluster.toml");
    let page = dir.path().join("plan.html");
    let (write, html) = (
        format!("--write={}", cluster.display()),
        format!("--html={}", page.display()),
    );
    let space: Vec<&str> = SMALL
        .iter()
        .copied()
        .filter(|flag| !flag.starts_with("--serving"))
        .collect();
    let (code, json, err) = plan(&[
        LOAD,
        &space,
        &["--serving=disaggregated", "--quick", &write, &html],
    ]);
    assert_eq!(code, Some(0), "{err}");
    let answer = &json["answers"][0]["answer"];
    let text = std::fs::read_to_string(&cluster).unwrap();
    for part in ["[pool.prefill]", "[pool.decode]", "mode = \"flows\""] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (code, out, err) = run(&[
        "simulate",
        cluster.to_str().unwrap(),
        "--rate=30",
        "--isl=1200",
        "--osl=40",
        "--requests=240",
        "--slo=ttft=600ms,itl=60ms",
        "--json",
        "--quiet",
    ]);
    assert_eq!(code, Some(0), "{err}");
    let run: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(run["simulation"]["digest"], answer["digest"]);
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("<svg") || page.contains("<table"), "a page");
    assert!(page.contains("prefill + "), "{page}");
    // In sentences for everyone, and legible on a phone, where each line of a row has its name.
    let rent = format!(
        "<p class=\"lead\">Rent {} GPUs of type l40s",
        answer["gpus"]
    );
    assert!(page.contains(&rent), "{rent}: {page}");
    assert!(page.contains("that compute prompts"), "{page}");
    assert!(page.contains("data-name=\"TPOT p99, ms\""), "{page}");
}

#[test]
fn each_class_attains() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("w.toml");
    std::fs::write(
        &file,
        "seed = 3\nrequests = 240\n[arrival]\nkind = \"poisson\"\nrate_per_s = 20\n\
         [[class]]\nname = \"chat\"\nweight = 9\nisl = 300\nosl = 30\nslo = \"ttft=10s\"\n\
         [[class]]\nname = \"long\"\nisl = 6000\nosl = 10\nslo = \"ttft=1500ms\"\n",
    )
    .unwrap();
    let space: Vec<&str> = SMALL
        .iter()
        .copied()
        .filter(|flag| !flag.starts_with("--slo"))
        .collect();
    let rest = ["--model=llama-3.1-8b", "--quick", "--quiet", "--seeds=2"];
    let (code, json, err) = plan(&[&[file.to_str().unwrap()], &space, &rest]);
    assert_eq!(code, Some(0), "{err}");
    let answer = &json["answers"][0];
    let classes = answer["answer"]["classes"].as_array().unwrap();
    assert_eq!(classes.len(), 2);
    assert_eq!(
        (&classes[0]["name"], &classes[1]["name"]),
        (&"chat".into(), &"long".into())
    );
    assert_eq!(answer["interval"]["seeds"], 2);
    assert!(
        answer["interval"]["mean"].as_f64().unwrap() >= 0.95,
        "{answer}"
    );
}

#[test]
fn wrong_questions_say_what_is_missing() {
    for (args, part) in [
        (&["--rate=3"][..], "no objective"),
        (&["--slo=ttft=1s"], "no workload"),
        (
            &["--rate=3", "--slo=ttft=1s", "--gpus=h101"],
            "neither a preset nor a [gpu.h101]",
        ),
        (&["--rate=3", "--slo=ttft=1s", "--attain=99"], "write 99%"),
        (&["--rate=3", "--slo=ttft=1s", "--load=0"], "--load has 0"),
        (
            &["--rate=3", "--slo=ttft=1s", "--load=1,2,1.0"],
            "--load has 1 twice",
        ),
        (&["--rate=3", "--slo=ttft=1s", "--load=1,"], "--load"),
        (
            &["--rate=3", "--slo=ttft=1s", "--gpus=l4,h100-sxm,l4"],
            "--gpus has l4 twice; keep one",
        ),
        (
            &["--rate=3", "--slo=ttft=1s", "--gpus=l4", "--gpus=l4"],
            "--gpus has l4 twice; keep one",
        ),
        (&["--rate=3", "--slo=ttft=1s", "--gpus=l4,"], "--gpus"),
        (
            &["--rate=3", "--slo=ttft=1s", "--policies=kv,,random"],
            "leave out the comma",
        ),
        (
            &["--rate=3", "--slo=ttft=1s", "--set=engine.max_num_seqs=4"],
            "--max-num-seqs",
        ),
        (
            &["--rate=3", "--slo=ttft=1s", "--load=1,2", "--write=/tmp/x"],
            "one by one",
        ),
        (&["w.toml", "--slo=ttft=1s", "--rate=3"], "--workload-set"),
        (
            &["--rate=3", "--slo=ttft=1s", "--precision=fp3"],
            "one of bf16, fp8, int8, int4, nvfp4, mxfp4",
        ),
        (
            &[
                "--rate=3",
                "--slo=ttft=1s",
                "--set=engine.kv_cache_dtype=fp8",
            ],
            "--kv-cache-dtype",
        ),
        (
            &["--rate=3", "--slo=ttft=1s", "--policies=direct"],
            "one of round_robin",
        ),
        (
            &["--rate=3", "--slo=ttft=1s", "--model=gpt-9"],
            "not a preset",
        ),
    ] {
        let mut all = vec!["plan"];
        all.extend(args);
        let (code, _, err) = run(&all);
        assert_eq!(code, Some(2), "{args:?}: {err}");
        assert!(err.contains(part), "{args:?}: {err}");
    }
}

/// Flags of a search among one GPU, one size and one setting.
const ONE: &[&str] = &[
    "--rate=4",
    "--isl=600",
    "--osl=30",
    "--requests=80",
    "--seeds=1",
    "--quiet",
    "--quick",
    "--serving=aggregated",
    "--max-num-seqs=256",
    "--max-num-batched-tokens=8192",
    "--policies=kv",
    "--slo=ttft=5s,itl=500ms",
    "--attain=90%",
];

#[test]
fn checkpoints_keep_their_format_and_others_are_searched_if_asked_for() {
    let search = |flags: &[&str]| plan(&[ONE, flags, &["--gpus=h100-sxm", "--tensor-parallel=1"]]);
    // A checkpoint in 4 bits is not searched in 8 or 16.
    let (code, json, err) = search(&["--model=gpt-oss-120b"]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(json["answers"][0]["answer"]["dtype"], "mxfp4", "{json}");
    let (code, _, err) = search(&["--model=gpt-oss-120b", "--precision=fp8"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("gpt-oss-120b has mxfp4 weights"), "{err}");
    // A model in 16 bits that fits one GPU in 4 only.
    let (code, json, err) = search(&["--model=llama-3.1-70b", "--precision=bf16,int4"]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(json["answers"][0]["answer"]["dtype"], "int4", "{json}");
}

/// The searched values are part of the output, defaults included.
#[test]
fn the_axes_of_the_search_are_named() {
    let flags = [
        "plan",
        "--model=llama-3.1-8b",
        "--gpus=h100-sxm",
        "--tensor-parallel=1",
    ];
    let (code, out, err) = run(&[&flags, ONE].concat());
    assert_eq!(code, Some(0), "{err}");
    let expected = "searched: GPUs h100-sxm; tensor parallel 1; weights bf16, fp8; KV cache auto; max_num_seqs 256; \
                    max_num_batched_tokens 8192; policies kv; up to 1024 GPUs\n";
    assert!(out.contains(expected), "{out}");
}

/// One worker for prompts and one for answers: the sizes around that answer are clusters, too.
#[test]
fn the_smallest_split_cluster_has_runners_up_and_sensitivity() {
    let flags = [
        "--model=llama-3.1-8b",
        "--gpus=h100-sxm",
        "--rate=4",
        "--isl=600",
        "--osl=30",
        "--requests=80",
        "--serving=disaggregated",
        "--max-num-seqs=256",
        "--max-num-batched-tokens=8192",
        "--policies=kv",
        "--slo=ttft=5s,itl=500ms",
    ];
    let (code, json, err) = plan(&[&flags, &["--tensor-parallel=1", "--precision=bf16"]]);
    assert_eq!(code, Some(0), "{err}");
    let answer = &json["answers"][0];
    assert_eq!(answer["answer"]["workers"], 2, "{json}");
    assert_eq!(answer["answer"]["prefill_workers"], 1);
    assert_eq!(answer["sensitivity"].as_array().unwrap().len(), 6);
}

/// The output states the question and its assumptions.
#[test]
fn the_question_and_its_assumptions_are_part_of_the_output() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    // 40 requests, one every half second; each other prompt of 1,024 tokens is one of before.
    let lines: Vec<String> = (0..40)
        .map(|n| {
            let ids = [n / 2 * 2, n / 2 * 2 + 1];
            format!(
                "{{\"timestamp\": {}, \"input_length\": 1024, \"output_length\": 20, \"hash_ids\": {ids:?}}}\n",
                n * 500
            )
        })
        .collect();
    std::fs::write(at("t.jsonl"), lines.concat()).unwrap();
    let flags = [
        "plan",
        &at("t.jsonl"),
        "--slo=ttft=5s,itl=500ms",
        "--serving=aggregated",
        "--tensor-parallel=1",
        "--max-num-seqs=256",
        "--max-num-batched-tokens=8192",
        "--policies=kv",
        "--quick",
        "--quiet",
    ];
    let (code, out, err) = run(&flags);
    assert_eq!(code, Some(0), "{err}");
    for part in [
        "workload   t.jsonl: 40 requests in 19.5 s (2.00 per second); prompts of 1,024 and answers of 20 tokens on average; \
         50.0 % of the prompt tokens repeat earlier ones\n",
        "objective  99.00 % of requests within ttft=5s,itl=500ms\n",
        "assumed    model qwen3-8b, as neither --model nor --cluster names one\n",
        "as there is no --cluster",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    // Stated values are not assumed.
    std::fs::write(at("c.toml"), "[model]\npreset = \"llama-3.1-8b\"\n").unwrap();
    let cluster = format!("--cluster={}", at("c.toml"));
    let (code, out, err) = run(&[&flags[..], &[&cluster]].concat());
    assert_eq!(code, Some(0), "{err}");
    assert!(!out.contains("assumed"), "{out}");
    assert!(out.contains("model      llama-3.1-8b\n"), "{out}");
}

#[test]
fn names_that_are_nearly_right_are_suggested() {
    for (flag, part) in [
        (
            "--gpus=H100",
            "did you mean h100-sxm or h100-pcie or h100-nvl?",
        ),
        ("--model=llama3.1-8b", "did you mean llama-3.1-8b?"),
        (
            "--model=meta-llama/Llama-3.1-8",
            "did you mean llama-3.1-8b?",
        ),
    ] {
        let (code, _, err) = run(&["plan", "--rate=3", "--slo=ttft=1s", flag]);
        assert_eq!(code, Some(2), "{flag}: {err}");
        assert!(err.contains(part), "{flag}: {err}");
    }
}

/// Real engines serve a model that the file does not name: a simulation of the default one would answer for another.
#[test]
fn a_file_of_real_engines_is_not_simulated_as_the_default_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.toml");
    let engines = "[pool.main]\nengines = [\"http://127.0.0.1:9\"]\n";
    let file = path.display().to_string();
    let simulate = |text: &str| {
        std::fs::write(&path, text).unwrap();
        run(&["simulate", &file, "--requests=3"])
    };
    let (code, _, err) = simulate(engines);
    assert_eq!(code, Some(2), "{err}");
    for part in [
        "pool `main`",
        "slipstream describe http://127.0.0.1:9",
        "`model.preset`",
    ] {
        assert!(err.contains(part), "{part}: {err}");
    }
    let (code, _, err) = simulate(&format!("{engines}[model]\npreset = \"llama-3.1-8b\"\n"));
    assert_eq!(code, Some(0), "{err}");
}

/// A hundred beginnings, of which four GPUs hold about half: host memory takes the place of GPUs, unless it costs more than they do or
/// is not needed.
#[test]
fn host_memory_is_searched() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (workload, prices, cluster) = (at("w.toml"), at("p.toml"), at("c.toml"));
    let answer = |rate: f64, host_gib: f64, more: &[&str]| {
        std::fs::write(
            &workload,
            format!(
                "requests = 500\nisl = 6200\nosl = 20\n\
                 [arrival]\nkind = \"poisson\"\nrate_per_s = {rate}\n[[prefix]]\nbranches = 100\ntokens = 6000\n"
            ),
        )
        .unwrap();
        std::fs::write(
            &prices,
            format!("[prices]\nl4 = 0.5\nhost-gib = {host_gib}\n"),
        )
        .unwrap();
        let flags = [
            &workload,
            "--slo=ttft=2s,tpot=150ms",
            "--model=llama-3.1-8b",
            "--gpus=l4",
            "--precision=fp8",
            "--tensor-parallel=1",
            "--seeds=1",
            "--attain=90%",
            "--quiet",
            "--quick",
            "--serving=aggregated",
            "--max-num-seqs=64",
            "--max-num-batched-tokens=8192",
            "--policies=kv",
            "--prices",
            &prices,
            "--write",
            &cluster,
        ];
        let (code, json, err) = plan(&[&flags, more]);
        assert_eq!(code, Some(0), "{err}");
        let answer = json["answers"][0]["answer"].clone();
        let number = |name: &str| answer[name].as_f64();
        (
            number("gpus").unwrap(),
            number("host_memory_gib"),
            number("cost_per_hour").unwrap(),
            answer["digest"].as_str().unwrap().to_owned(),
        )
    };
    const MEMORY: &[&str] = &[
        "--host-memory=0,64",
        "--set=engine.host_tier.bytes_per_s=20e9",
    ];
    let without = answer(3.0, 0.0, &[]);
    assert_eq!((without.1, without.2), (None, 0.5 * without.0));
    let with = answer(3.0, 0.001, MEMORY);
    assert_eq!(with.1, Some(64.0));
    assert!(with.0 < without.0, "{with:?} {without:?}");
    assert!((with.2 - with.0 * 0.564).abs() < 1e-9, "{with:?}");
    // The written cluster has it.
    let (code, run_of, err) = run(&[
        "simulate",
        &cluster,
        "--workload",
        &workload,
        "--json",
        "--quiet",
    ]);
    assert_eq!(code, Some(0), "{err}");
    let run_of: Value = serde_json::from_str(&run_of).unwrap();
    assert_eq!(run_of["simulation"]["digest"], with.3.as_str());
    assert!(run_of["engine"]["host_hit_tokens"].as_f64() > Some(0.0));
    let dear = answer(3.0, 1.0, MEMORY);
    assert_eq!(
        (dear.0, dear.1, &dear.3),
        (without.0, Some(0.0), &without.3)
    );
    // One GPU is enough, and free memory is not needed.
    let idle = answer(0.05, 0.0, MEMORY);
    assert_eq!((idle.0, idle.1), (1.0, Some(0.0)));
}

#[test]
fn the_format_of_the_kv_cache_is_searched() {
    // Half the bytes per token let twice as many long requests run at a time.
    let flags = [
        "--model=llama-3.1-8b",
        "--gpus=l4",
        "--precision=fp8",
        "--tensor-parallel=1",
        "--isl=6000",
        "--osl=200",
        "--rate=2",
        "--requests=120",
        "--seeds=1",
        "--quiet",
        "--quick",
        "--serving=aggregated",
        "--max-num-seqs=256",
        "--max-num-batched-tokens=8192",
        "--policies=kv",
        "--slo=ttft=20s,tpot=200ms",
        "--attain=90%",
    ];
    let gpus_with = |formats: &str| {
        let (code, json, err) = plan(&[&flags, &[formats]]);
        assert_eq!(code, Some(0), "{err}");
        (
            gpus(&json),
            json["answers"][0]["answer"]["kv_cache_dtype"].clone(),
        )
    };
    let (auto, format) = gpus_with("--kv-cache-dtype=auto");
    assert_eq!(format, "auto");
    let (both, format) = gpus_with("--kv-cache-dtype=auto,fp8");
    assert!(both < auto, "{both} of {auto}");
    assert_eq!(format, "fp8");
}

#[test]
fn gpus_of_the_cluster_file_are_searched() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    std::fs::write(
        &file,
        "[gpu.ours]\nlike = \"h100-sxm\"\nmemory_bytes = 100e9\n",
    )
    .unwrap();
    let cluster = format!("--cluster={}", file.display());
    let written = dir.path().join("plan.toml");
    let write = format!("--write={}", written.display());
    let flags = [
        &cluster,
        &write,
        "--model=llama-3.1-8b",
        "--gpus=ours,l40s",
        "--tensor-parallel=1",
        "--price=ours=1",
        "--price=l40s=5",
    ];
    let (code, json, err) = plan(&[ONE, &flags]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(json["answers"][0]["answer"]["gpu"], "ours", "{json}");
    // The written cluster knows the GPU, and a flag for a key of its pool names that key.
    let run_it = |flags: &[&str]| {
        let base = [
            "simulate",
            written.to_str().unwrap(),
            "--rate=4",
            "--requests=40",
            "--quiet",
        ];
        run(&[&base[..], flags].concat())
    };
    let (code, _, err) = run_it(&[]);
    assert_eq!(code, Some(0), "{err}");
    let (code, _, err) = run_it(&["--set=engine.max_num_seqs=4"]);
    assert_eq!(code, Some(2));
    assert!(
        err.contains("set `pool.main.engine.max_num_seqs` instead"),
        "{err}"
    );
}

/// Ranks, experts and the router's weight, of a mixture: the lowest cost is that of a sweep over every combination up to
/// it. The bounds leave none of them out that could be the answer.
#[test]
fn ranks_experts_and_weights_are_searched_as_every_combination() {
    const ALL: &[&str] = &[
        "--rate=60",
        "--isl=1500",
        "--osl=40",
        "--requests=300",
        "--attain=95%",
        "--quiet",
    ];
    for slo in ["--slo=ttft=250ms,itl=25ms", "--slo=ttft=100ms,itl=12ms"] {
        let (code, json, err) = plan(&[
            ALL,
            &[
                slo,
                "--model=qwen3-30b-a3b",
                "--gpus=h100-sxm",
                "--precision=fp8",
                "--tensor-parallel=1,2",
                "--data-parallel=1,2",
                "--expert-parallel=off,on",
                "--serving=aggregated",
                "--max-num-seqs=64",
                "--max-num-batched-tokens=8192",
                "--policies=kv",
                "--prefill-weights=4,0",
                "--temperatures=0",
                "--max-gpus=16",
                "--seeds=1",
                "--quick",
            ],
        ]);
        assert!(code == Some(0) || code == Some(1), "{err}");
        let answer = (code == Some(0)).then(|| gpus(&json));
        if let Some(gpus) = answer {
            let best = &json["answers"][0]["answer"];
            for key in ["data_parallel_size", "expert_parallel", "prefill_weight"] {
                assert_ne!(best[key], Value::Null, "{key}: {best}");
            }
            assert_eq!(best["temperature"], 0.0);
            assert!(gpus > 1, "{best}");
        }
        let (mut least, mut runs) = (None, 0);
        for (tp, dp, ep) in [(1, 1, false), (1, 2, false), (1, 2, true), (2, 1, false)]
            .into_iter()
            .chain([(2, 1, true), (2, 2, false), (2, 2, true)])
        {
            let most = answer.unwrap_or(16) / (tp * dp);
            if most == 0 {
                continue;
            }
            let sets = [
                "--set=model.preset=qwen3-30b-a3b".to_owned(),
                "--set=engine.timing.dtype=fp8".into(),
                "--set=engine.max_num_seqs=64".into(),
                format!("--set=engine.tensor_parallel_size={tp}"),
                format!("--set=engine.data_parallel_size={dp}"),
                format!("--set=engine.enable_expert_parallel={ep}"),
                format!("--vary=pool.main.workers=1..{most}"),
                "--vary=router.prefill_weight=4,0".into(),
            ];
            let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
            let (code, out, err) = run(&[&["sweep", slo], &sets[..], ALL].concat());
            assert_eq!(code, Some(0), "{err}");
            for line in out.lines() {
                let cells: Vec<&str> = line.split_whitespace().collect();
                let workers = cells.first().and_then(|cell| cell.parse::<u64>().ok());
                let Some(workers) = workers else { continue };
                runs += 1;
                if cells.contains(&"yes") {
                    least = Some(least.unwrap_or(u64::MAX).min(workers * tp * dp));
                }
            }
        }
        assert!(runs > 7, "{runs}");
        assert_eq!(answer, least, "{slo}");
    }
}

/// Drafts of a length that pays: the lowest cost is that of the lengths one by one, which `--set` gives to all shapes.
#[test]
fn lengths_of_drafts_are_searched() {
    let answer = |more: &[&str]| {
        let flags = [
            "--slo=ttft=2s,tpot=22ms",
            "--rate=40",
            "--isl=500",
            "--osl=150",
            "--requests=300",
            "--model=llama-3.1-8b",
            "--gpus=l40s",
            "--precision=fp8",
            "--tensor-parallel=1",
            "--serving=aggregated",
            "--max-num-seqs=64",
            "--max-num-batched-tokens=8192",
            "--policies=kv",
            "--seeds=1",
            "--attain=90%",
            "--quiet",
            "--quick",
        ];
        let (code, json, err) = plan(&[&flags, more]);
        assert_eq!(code, Some(0), "{err}");
        let best = &json["answers"][0]["answer"];
        (
            best["gpus"].as_u64().unwrap(),
            best["draft_tokens"].as_u64(),
        )
    };
    const DRAFTER: &[&str] = &[
        "--set=engine.speculation.method=mtp",
        "--set=engine.speculation.acceptance=[0.8, 0.6, 0.4]",
        "--set=engine.speculation.draft_us=300",
    ];
    let with = |more: &[&str]| answer(&[DRAFTER, more].concat());
    let plain = answer(&[]);
    assert_eq!(plain.1, None);
    let each = [0, 1, 3].map(|tokens| {
        if tokens == 0 {
            return plain.0;
        }
        let tokens = format!("--set=engine.speculation.num_speculative_tokens={tokens}");
        with(&[&tokens]).0
    });
    let best = with(&["--speculation=0,1,3"]);
    assert_eq!(best.0, *each.iter().min().unwrap(), "{each:?}");
    assert!(best.0 < plain.0 && best.1 > Some(0), "{best:?} {each:?}");
    assert_eq!(with(&["--speculation=0"]), (plain.0, Some(0)));
}

/// Stages beside tensor parallelism, over a slow link: the lowest cost is that of a sweep over every combination up to it.
#[test]
fn stages_are_searched_as_every_combination() {
    const ALL: &[&str] = &[
        "--isl=3000",
        "--osl=40",
        "--requests=200",
        "--attain=95%",
        "--set=engine.max_num_seqs=64",
        "--set=engine.timing.gpu=l4",
        "--set=engine.timing.dtype=bf16",
        "--quiet",
    ];
    let mut staged = 0;
    for (model, slo, rate, budget) in [
        ("llama-3.1-8b", "--slo=ttft=6s,itl=250ms", "--rate=2", 8192),
        ("llama-3.1-8b", "--slo=ttft=2s,itl=120ms", "--rate=1", 2048),
        // One GPU has no room for its weights.
        ("qwen3-14b", "--slo=ttft=6s,itl=300ms", "--rate=1", 512),
    ] {
        let (code, json, err) = plan(&[&[
            slo,
            rate,
            &format!("--model={model}"),
            "--gpus=l4",
            "--precision=bf16",
            "--tensor-parallel=1,2",
            "--pipeline-parallel=1,2,3",
            "--serving=aggregated",
            "--max-num-seqs=64",
            &format!("--max-num-batched-tokens={budget}"),
            "--policies=kv",
            "--max-gpus=12",
            "--seeds=1",
            "--quick",
            "--isl=3000",
            "--osl=40",
            "--requests=200",
            "--attain=95%",
            "--quiet",
        ]]);
        assert!(code == Some(0) || code == Some(1), "{err}");
        let answer = (code == Some(0)).then(|| gpus(&json));
        if answer.is_some() {
            let best = &json["answers"][0]["answer"];
            staged += u32::from(best["pipeline_parallel_size"].as_u64() > Some(1));
        }
        let mut least = None;
        for (tp, pp) in [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)] {
            let most = answer.unwrap_or(12) / (tp * pp);
            if most == 0 || model == "qwen3-14b" && tp * pp == 1 {
                continue;
            }
            let sets = [
                slo.to_owned(),
                rate.to_owned(),
                format!("--set=model.preset={model}"),
                format!("--set=engine.tensor_parallel_size={tp}"),
                format!("--set=engine.pipeline_parallel_size={pp}"),
                format!("--set=engine.max_num_batched_tokens={budget}"),
                format!("--vary=pool.main.workers=1..{most}"),
            ];
            let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
            let (code, out, err) = run(&[&["sweep"], &sets[..], ALL].concat());
            assert_eq!(code, Some(0), "{err}");
            for line in out.lines() {
                let cells: Vec<&str> = line.split_whitespace().collect();
                let workers = cells.first().and_then(|cell| cell.parse::<u64>().ok());
                if let Some(workers) = workers.filter(|_| cells.contains(&"yes")) {
                    least = Some(least.unwrap_or(u64::MAX).min(workers * tp * pp));
                }
            }
        }
        assert_eq!(answer, least, "{slo}");
    }
    assert!(staged > 0, "no question has an answer with stages");
}

#[test]
fn axes_that_cannot_be_searched_are_refused_by_name() {
    let base = ["plan", "--rate=2", "--slo=ttft=5s", "--model=llama-3.1-8b"];
    for (flags, parts) in [
        (
            &["--pipeline-parallel=64"][..],
            ["`pipeline_parallel_size` is 64", "has 32 layers"],
        ),
        (&["--kv-tiers=host"], ["--kv-tiers", "--host-memory 0,256"]),
        (
            &["--host-memory=-1"],
            ["--host-memory has -1", "1,000,000 GiB"],
        ),
        (
            &["--host-memory=0,64", "--set=engine.host_tier.gib=8"],
            ["engine.host_tier.gib", "restrict it with --host-memory"],
        ),
        (&["--speculation=0,40"], ["--speculation", "0 to 32"]),
        (
            &["--expert-parallel=on"],
            ["enable_expert_parallel", "llama-3.1-8b has no experts"],
        ),
        (
            &["--data-parallel=2", "--set=engine.data_parallel_size=4"],
            [
                "engine.data_parallel_size",
                "restrict it with --data-parallel",
            ],
        ),
        (
            &["--prefill-weights=1", "--policies=round_robin"],
            ["--prefill-weights", "policy kv"],
        ),
        (
            &["--temperatures=-1"],
            ["--temperatures has -1", "0 to 1,000,000"],
        ),
    ] {
        let (code, out, err) = run(&[&base[..], flags].concat());
        assert_eq!(code, Some(2), "{flags:?}: {out}{err}");
        for part in parts {
            assert!(err.contains(part), "{flags:?}: {err}");
        }
    }
}

/// Fewest and most workers with `[autoscale]`: the cheapest is that of every combination, each simulated by itself.
#[test]
fn bounds_of_autoscaling_are_searched_as_every_combination() {
    const BURST: &[&str] = &["--rate=40", "--isl=1200", "--osl=40", "--requests=1600"];
    const SLO: &str = "--slo=ttft=2s,itl=60ms";
    const POLICY: &[&str] = &[
        "--set=autoscale.policy=utilization",
        "--set=autoscale.target=0.05",
        "--set=autoscale.interval_s=1",
        "--set=autoscale.cooldown_s=5",
    ];
    let (code, json, err) = plan(&[
        BURST,
        POLICY,
        &[
            SLO,
            "--attain=90%",
            "--model=llama-3.1-8b",
            "--gpus=l40s",
            "--precision=bf16",
            "--tensor-parallel=1",
            "--serving=aggregated",
            "--max-num-seqs=256",
            "--max-num-batched-tokens=8192",
            "--policies=kv",
            "--autoscale-min=1,2,4",
            "--seeds=1",
            "--quick",
            "--quiet",
        ],
    ]);
    assert_eq!(code, Some(0), "{err}");
    let fixed = gpus(&json);
    assert!(fixed > 1, "{json}");
    let scaled = &json["answers"][0]["autoscaled"];
    let (mut least, mut runs) = (fixed as f64, 0);
    let mut most: Vec<u64> = [1.0, 1.5, 2.0]
        .map(|f| (f * fixed as f64).ceil() as u64)
        .into();
    most.dedup();
    for workers_max in most {
        for workers_min in [1, 2, 4].into_iter().filter(|min| *min <= workers_max) {
            runs += 1;
            let sets = [
                format!("--set=pool.main.workers={workers_max}"),
                format!("--set=autoscale.workers_min={workers_min}"),
            ];
            let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
            let shape = [
                "simulate",
                "--json",
                "--quiet",
                "--set=model.preset=llama-3.1-8b",
                "--set=engine.timing.gpu=l40s",
                "--set=engine.timing.dtype=bf16",
                SLO,
            ];
            let (code, out, err) = run(&[&shape[..], &sets, POLICY, BURST].concat());
            assert_eq!(code, Some(0), "{err}");
            let json: Value = serde_json::from_str(&out).unwrap();
            let mean = json["autoscale"]["pools"][0]["workers_mean"]
                .as_f64()
                .unwrap();
            if json["goodput"]["share"].as_f64().unwrap() >= 0.9 && mean < least {
                least = mean;
            }
        }
    }
    let found = scaled["best"]["workers_mean"].as_f64();
    let found = found.expect("one of them costs less");
    assert!((found - least).abs() < 1e-6, "{scaled}: {least}");
    // Four at least cost no less than the answer's four.
    assert!(scaled["left_out"].as_u64().unwrap() > 0, "{scaled}");
    let tried = scaled["runs"].as_u64().unwrap() + scaled["left_out"].as_u64().unwrap();
    assert_eq!(tried, runs, "{scaled}");
    // Without a policy there is nothing to search.
    let (code, _, err) = plan(&[LOAD, SMALL, &["--autoscale-min=1"]]);
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("--autoscale-min needs a policy"), "{err}");
}

/// A large mixture with four key-value heads: eight GPUs that each hold all of its attention take two thirds of the GPUs
/// that divide it.
#[test]
fn ranks_of_a_mixture_take_fewer_gpus_than_tensor_parallelism() {
    let answer = |parallel: &[&str]| {
        let (code, json, err) = plan(&[
            parallel,
            &[
                "--model=qwen3-235b-a22b",
                "--gpus=h100-sxm",
                "--precision=fp8",
                "--rate=30",
                "--isl=1500",
                "--osl=100",
                "--requests=300",
                "--slo=ttft=1s,itl=40ms",
                "--attain=95%",
                "--serving=aggregated",
                "--max-num-seqs=128",
                "--max-num-batched-tokens=8192",
                "--policies=kv",
                "--max-gpus=64",
                "--seeds=1",
                "--quick",
                "--quiet",
            ],
        ]);
        assert_eq!(code, Some(0), "{err}");
        json["answers"][0]["answer"].clone()
    };
    let divided = answer(&["--tensor-parallel=4,8"]);
    assert_eq!(
        (&divided["gpus"], &divided["data_parallel_size"]),
        (&24.into(), &Value::Null)
    );
    let ranks = answer(&[
        "--tensor-parallel=1,4,8",
        "--data-parallel=1,8",
        "--expert-parallel=off,on",
    ]);
    assert_eq!(
        (
            &ranks["gpus"],
            &ranks["tensor_parallel_size"],
            &ranks["data_parallel_size"]
        ),
        (&16.into(), &1.into(), &8.into())
    );
}

/// A burst of a few requests would need less than the rate that it is taken from.
#[test]
fn a_rate_alone_is_two_minutes_of_it() {
    let flags = "plan --rate=8 --isl=64 --osl=4 --slo=ttft=5s --model=llama-3.1-8b --gpus=l40s --max-gpus=1 --quick --seeds=1";
    let asked = |more: &[&str]| {
        let flags: Vec<&str> = flags.split(' ').chain(more.iter().copied()).collect();
        let (code, out, err) = run(&flags);
        assert_eq!(code, Some(0), "{err}");
        (out, err)
    };
    let (out, err) = asked(&[]);
    assert!(
        err.contains("note: 960 requests") && out.contains("960 requests"),
        "{out}{err}"
    );
    for stated in ["--requests=20", "--duration=5s"] {
        let (out, err) = asked(&[stated]);
        assert!(!err.contains("note:") && !out.contains("960"), "{out}{err}");
    }
}
