//! Faults of more than one worker's steps: examples worked out by hand.

use slipstream_twin::{FRONTEND_LOST, Options, Outcome};

use super::model::{APART, Ended, KV_BYTES, MS, load, simulate, ten_ms};
use super::{cluster, workload};

const TWO: &str = "[pool.main]\nworkers = 2\n";
const TURNS: &str = "[router]\npolicy = \"round_robin\"\n";

/// The requests in the order of their arrival.
fn run(
    pools: &str,
    more: &str,
    (count, rate): (u32, u32),
    options: &Options,
) -> (Outcome, Vec<Ended>) {
    let cluster = ten_ms(pools, more);
    let (outcome, mut ended) = simulate(&cluster, &load(count, rate, 100, 7), options);
    assert_eq!(outcome.cut, None);
    ended.sort_by_key(|e| e.id);
    (outcome, ended)
}

/// The times of the only request's first and last token, and its tokens and retries.
fn one(pools: &str, more: &str) -> (u64, u64, u32, u32) {
    let (_, ended) = run(pools, more, (1, 1), &Options::default());
    let e = &ended[0];
    assert_eq!(e.error, None);
    (e.first, e.last, e.tokens, e.retries)
}

#[test]
fn a_gpu_that_is_gone_stops_its_worker_until_that_is_noticed() {
    // Tokens at 10 and 20 ms. Nothing more until 125 ms; then the other worker goes on.
    let gone = "[[event]]\nkind = \"gpu\"\nat_s = 0.025\ndetect_s = 0.1\nworker = 0\n";
    let (first, last, tokens, retries) = one(TWO, &format!("{TURNS}{gone}"));
    assert_eq!((first, last), (10 * MS, (125 + 5 * 10) * MS));
    assert_eq!((tokens, retries), (7, 1));
    // Noticed at once it is a crash.
    let crash = "[[event]]\nkind = \"crash\"\nat_s = 0.025\nuntil_s = 0.0251\nworker = 0\n";
    let at_once = gone.replace("detect_s = 0.1\n", "");
    let crash = one(TWO, &format!("{TURNS}{crash}"));
    assert_eq!(one(TWO, &format!("{TURNS}{at_once}")), crash);

    // It takes requests again a start-up later: from the loss of the worker, or from the end of the event.
    for (until, ready) in [("", 1_125), ("until_s = 0.5\n", 1_500)] {
        let text = format!(
            "[model]\npreset = \"qwen3-8b\"\n{TWO}[engine]\nnum_gpu_blocks = 4096\nstartup_s = 1\n\
             [engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n{TURNS}{gone}{until}"
        );
        let load = load(300, 100, 20, 2);
        let (outcome, ended) = simulate(&cluster(&text), &load, &Options::default());
        assert_eq!((outcome.cut, outcome.totals.requests.failed), (None, 0));
        let later = ended.iter().filter(|e| e.due > 125 * MS);
        let back = later.filter(|e| e.workers.1 == Some(0)).map(|e| e.due);
        let back = back.min().unwrap() / MS;
        assert!((ready..=ready + 20).contains(&back), "{back} for {ready}");
    }
}

#[test]
fn a_record_has_the_times_of_the_attempt_that_was_answered() {
    // The prompt of the second request is computed from 100 to 120 ms, and would be fetched when the first answer leaves
    // blocks free. Its worker is lost before; the other one computes it again.
    let pools = "[pool.p]\nrole = \"prefill\"\nworkers = 2\n[pool.d]\nrole = \"decode\"\n\
                 [pool.d.engine]\nnum_gpu_blocks = 1026\n";
    let crash = "[[event]]\nkind = \"crash\"\nat_s = 0.15\nuntil_s = 9\nworker = 1\n";
    let load = workload(
        "requests = 2\n[arrival]\nkind = \"timestamps\"\nms = [0, 100]\n\
         [[class]]\nisl = 16000\nosl = 20\n",
    );
    let cluster = ten_ms(pools, &format!("{TURNS}{crash}"));
    let (outcome, mut ended) = simulate(&cluster, &load, &Options::default());
    assert_eq!((outcome.cut, outcome.totals.requests.failed), (None, 0));
    ended.sort_by_key(|e| e.id);
    let second = &ended[1];
    assert_eq!((second.workers, second.retries), ((Some(0), Some(2)), 1));
    let hops = second.hops;
    assert_eq!((hops.received.0, second.admitted), (150 * MS, 150 * MS));
    // 16,000 tokens in passes of 8,192; the first answer ends at 220 ms.
    assert_eq!(hops.prefilled.map(|at| at.0), Some(170 * MS));
    assert_eq!(
        hops.kv.map(|(from, to)| (from.0, to.0)),
        Some((220 * MS, 220 * MS))
    );
    assert_eq!(second.first, 230 * MS);
}

/// Two requests with a common beginning on two workers. The second goes where its blocks are if the router knows.
fn second_worker(events: &str, rate: &str) -> Option<u32> {
    let load = workload(&format!(
        "requests = 2\n[arrival]\nkind = \"constant\"\nrate_per_s = {rate}\n\
         [[class]]\nisl = 400\nosl = 50\n[[class.prefix]]\nbranches = 1\ntokens = 320\n"
    ));
    let router = "[router]\npolicy = \"kv\"\nprefill_weight = 10\n";
    let cluster = ten_ms(TWO, &format!("{router}{events}"));
    let (outcome, mut ended) = simulate(&cluster, &load, &Options::default());
    assert_eq!((outcome.cut, ended.len()), (None, 2));
    ended.sort_by_key(|e| e.id);
    assert_eq!(ended[0].workers.1, Some(0));
    ended[1].workers.1
}

#[test]
fn a_lost_kv_event_is_noticed_by_the_next_one() {
    let lost = |until_s: &str| {
        format!("[[event]]\nkind = \"kv_loss\"\nat_s = 0\nuntil_s = {until_s}\nworker = 0\n")
    };
    assert_eq!(second_worker("", "10"), Some(0));
    // The pass that ends at 10 ms stored 25 blocks. The next block is full after 16 tokens of the answer, at about
    // 170 ms: then the router sees the gap, and asks for a snapshot.
    assert_eq!(second_worker(&lost("0.05"), "10"), Some(1), "at 100 ms");
    assert_eq!(second_worker(&lost("0.05"), "4"), Some(0), "at 250 ms");
    assert_eq!(second_worker(&lost("0.6"), "4"), Some(1), "all are lost");
    let none = lost("0.6") + "share = 0\n";
    assert_eq!(second_worker(&none, "10"), Some(0));
}

#[test]
fn late_kv_events_keep_their_order() {
    let late = |ms: u32| {
        format!(
            "[[event]]\nkind = \"kv_late\"\nat_s = 0\nuntil_s = 0.05\nworker = 0\ndelay_ms = {ms}\n"
        )
    };
    assert_eq!(second_worker(&late(90), "10"), Some(0));
    assert_eq!(second_worker(&late(91), "10"), Some(1));
    // Those after the event's end wait for the late ones: there is no gap.
    assert_eq!(second_worker(&late(239), "4"), Some(0));
    assert_eq!(second_worker(&late(241), "4"), Some(1));
}

#[test]
fn a_frontend_that_is_lost_takes_its_streams_with_it() {
    let down = "[[event]]\nkind = \"frontend\"\nat_s = 0.035\nuntil_s = 1.5\n";
    for retries in [0, 1] {
        let options = Options {
            retries,
            ..Options::default()
        };
        let (outcome, ended) = run("", down, (3, 1), &options);
        // The first had three tokens.
        let error = ended[0].error.as_deref().unwrap();
        assert!(error.contains("frontend"), "{error}");
        assert_eq!((ended[0].tokens, ended[0].last), (3, 35 * MS));
        assert_eq!(outcome.totals.errors[FRONTEND_LOST].count, 1);
        // The second came while there was none, and tries again a second later.
        assert_eq!(ended[1].error.is_none(), retries == 1);
        if retries == 1 {
            assert_eq!(ended[1].first, 2_010 * MS);
        }
        assert_eq!((&ended[2].error, ended[2].first), (&None, 2_010 * MS));
    }
    // Prompts under way between two workers are gone, too, and block nothing.
    let early = "[[event]]\nkind = \"frontend\"\nat_s = 0.015\nuntil_s = 0.5\n";
    for order in ["pull", "push"] {
        let more = format!("[kv]\nhand_over = \"{order}\"\n{early}");
        let (_, ended) = run(APART, &more, (2, 1), &Options::default());
        assert!(ended[0].error.is_some());
        assert_eq!((&ended[1].error, ended[1].first), (&None, 1_020 * MS));
    }
}

#[test]
fn a_new_frontend_learns_of_caches_by_snapshots() {
    // The first request goes to worker 1, as worker 0 drains. The second comes at 1 s, to two idle workers.
    let second = |lag_ms: u32, more: &str| {
        let events = "[[event]]\nkind = \"drain\"\nat_s = 0\nuntil_s = 0.1\nworker = 0\n\
                      [[event]]\nkind = \"frontend\"\nat_s = 0.6\nuntil_s = 0.7\n";
        let cluster = ten_ms(
            TWO,
            &format!("[router]\npolicy = \"kv\"\nkv_lag_ms = {lag_ms}\n{more}{events}"),
        );
        let load = workload(
            "requests = 3\n[arrival]\nkind = \"constant\"\nrate_per_s = 1\n\
             [[class]]\nisl = 400\nosl = 5\n[[class.prefix]]\nbranches = 1\ntokens = 320\n",
        );
        let (outcome, mut ended) = simulate(&cluster, &load, &Options::default());
        assert_eq!((outcome.cut, outcome.totals.requests.failed), (None, 0));
        ended.sort_by_key(|e| e.id);
        assert_eq!(ended[0].workers.1, Some(1));
        (ended[1].workers.1, ended[2].workers.1)
    };
    for (lag_ms, expected) in [(0, Some(1)), (299, Some(1)), (301, Some(0))] {
        assert_eq!(second(lag_ms, "").0, expected, "{lag_ms} ms");
    }
    // Without KV events the router learns by what it routes.
    assert_eq!(second(0, "kv_events = false\n"), (Some(0), Some(0)));
}

#[test]
fn a_short_partition_delays_and_a_long_one_ends_connections() {
    let cut = |until_s: &str, more: &str| {
        let until = match until_s {
            "" => String::new(),
            at => format!("until_s = {at}\n"),
        };
        format!("[[event]]\nkind = \"partition\"\nat_s = 0.025\nworkers = [0]\n{until}{more}")
    };
    // Tokens at 10 and 20 ms; the rest arrives when the partition ends, or as computed.
    let turns = |events: String| one(TWO, &format!("{TURNS}{events}"));
    assert_eq!(turns(cut("0.1", "")), (10 * MS, 100 * MS, 7, 0));
    assert_eq!(turns(cut("0.045", "")), (10 * MS, 70 * MS, 7, 0));
    // After 0.2 s of silence the other worker continues with the third token.
    let deadline = "peer_deadline_s = 0.2\n";
    let continued = (10 * MS, (225 + 5 * 10) * MS, 7, 1);
    assert_eq!(turns(cut("1.0", deadline)), continued);
    assert_eq!(turns(cut("", deadline)), continued);
    // Requests that are sent into it wait for its end.
    let early = "[[event]]\nkind = \"partition\"\nat_s = 0\nuntil_s = 0.3\nworkers = [0]\n";
    assert_eq!(one("", early), (310 * MS, 370 * MS, 7, 0));
    // The worker comes back with its cache: of 100 tokens, 6 blocks are found again.
    let load = workload(
        "requests = 2\n[arrival]\nkind = \"constant\"\nrate_per_s = 1\n[[class]]\nisl = 100\nosl = 7\n\
         [[class.prefix]]\nbranches = 1\ntokens = 99\n",
    );
    let back = cut("0.5", deadline);
    let router = "[router]\npolicy = \"kv\"\nprefill_weight = 10\nresumes_max = 0\n";
    let (outcome, mut ended) = simulate(
        &ten_ms(TWO, &format!("{router}{back}")),
        &load,
        &Options::default(),
    );
    ended.sort_by_key(|e| e.id);
    assert!(ended[0].error.is_some(), "it may not continue");
    assert_eq!(ended[1].workers.1, Some(0));
    assert_eq!(outcome.engine.prefix_hit_tokens, Some(96.0));
}

#[test]
fn a_partition_between_prefill_and_decode_workers_stops_transfers() {
    let cut = |at_s: &str, until_s: &str| {
        format!(
            "[[event]]\nkind = \"partition\"\nat_s = {at_s}\nuntil_s = {until_s}\nworkers = [0]\n"
        )
    };
    // The prompt is computed at 10 ms; the decode worker cannot be asked before 100 ms.
    for order in ["pull", "push"] {
        let more = format!("[kv]\nhand_over = \"{order}\"\n{}", cut("0.005", "0.1"));
        assert_eq!(one(APART, &more), (110 * MS, 170 * MS, 7, 0), "{order}");
    }
    // A transfer that is under way begins again.
    let flows = "[network]\nmode = \"flows\"\nnic_bits_per_s = 4e10\n";
    let more = format!("{flows}{}", cut("0.011", "0.05"));
    let bytes_ns = 100 * KV_BYTES / 5;
    let first = 50 * MS + bytes_ns + 2_000 + 10 * MS;
    assert_eq!(one(APART, &more), (first, first + 60 * MS, 7, 0));
    // After the deadline another worker computes it. Both decode and prefill workers may be on the far side.
    let pools =
        "[pool.p]\nrole = \"prefill\"\nworkers = 2\n[pool.d]\nrole = \"decode\"\nworkers = 2\n";
    for worker in [0, 2] {
        let event = cut("0.005", "9").replace("[0]", &format!("[{worker}]"));
        let more = format!("{TURNS}{event}peer_deadline_s = 0.1\n");
        let (first, last, tokens, retries) = one(pools, &more);
        assert_eq!((tokens, retries), (7, 1), "worker {worker}");
        assert_eq!((first, last), ((105 + 20) * MS, (125 + 60) * MS));
    }
}

#[test]
fn workers_are_upgraded_one_after_another() {
    let text = |more: &str| {
        format!(
            "[model]\npreset = \"qwen3-8b\"\n{TWO}[engine]\nnum_gpu_blocks = 4096\nstartup_s = 0.3\n\
             [engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n{TURNS}\
             [[event]]\nkind = \"upgrade\"\nat_s = 0.501\n{more}"
        )
    };
    let load = load(400, 200, 50, 10);
    let (outcome, ended) = simulate(&cluster(&text("")), &load, &Options::default());
    assert_eq!((outcome.cut, outcome.totals.requests.failed), (None, 0));
    assert_eq!(outcome.resumes.times.count(), 0, "each ends where it began");
    // A request takes 100 to 110 ms: worker 0 is away from 501 to some 610 and 300 more, worker 1 after it.
    let away = |worker| {
        let mut on: Vec<u64> = (ended.iter())
            .filter(|e| e.workers.1 == Some(worker))
            .map(|e| e.due / MS)
            .collect();
        on.sort_unstable();
        let gap = on.windows(2).max_by_key(|pair| pair[1] - pair[0]).unwrap();
        (gap[0], gap[1])
    };
    let (first, second) = (away(0), away(1));
    assert!((490..=501).contains(&first.0), "{first:?}");
    assert!((900..=930).contains(&first.1), "{first:?}");
    assert!((first.1 - 20..=first.1).contains(&second.0), "{second:?}");
    assert!((395..=430).contains(&(second.1 - second.0)), "{second:?}");
    // With too little time to drain they continue on the other worker.
    let hasty = text("drain_timeout_s = 0.02\n");
    let (outcome, ended) = simulate(&cluster(&hasty), &load, &Options::default());
    assert_eq!((outcome.cut, outcome.totals.requests.failed), (None, 0));
    assert!(outcome.resumes.times.count() >= 10);
    assert!(ended.iter().all(|e| e.tokens == 10));
    // Idle workers restart at once, both.
    let (_, ended) = run(
        TWO,
        "[[event]]\nkind = \"upgrade\"\nat_s = 0.5\n",
        (2, 1),
        &Options::default(),
    );
    assert_eq!(ended[1].first, 1_010 * MS);
}
