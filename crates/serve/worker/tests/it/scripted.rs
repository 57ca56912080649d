//! A backend that does what a test says: several tokens per step, refusals, steps that never end, death.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use slipstream_base::width::{to_u32, to_usize};
use slipstream_base::{
    EngineRequest, FinishReason, ForwardPassMetrics, KvDelta, RequestId, Role, SimTime, TokenId,
    WorkerId,
};
use slipstream_engine::{
    Finished, FirstToken, LowerHits, PassOutput, Reserved, Stats, Usage, output_token,
};
use slipstream_planes::{PlaneLimits, RefusalReason, StreamAddr, ToWorker};
use slipstream_worker::{Backend, Dead, LiveTiming, Refused, WorkerSpec};

use crate::rig::{Rig, Setup, Shard, expected, rank, until, vocab};

/// Script of a backend. Steps are counted from 0.
#[derive(Clone, Debug, Default)]
struct Script {
    /// Tokens that each sequence gets in step `n`: `per_step[n % len]`. Empty: one.
    per_step: Vec<usize>,
    /// Requests whose seed it is are refused with this reason.
    refuses: Option<(u64, RefusalReason)>,
    /// This step never ends.
    stalls_at: Option<u64>,
    /// It dies when this step begins (false) or ends (true).
    dies_at: Option<(u64, bool)>,
    /// It ignores `max_tokens` by so many tokens.
    excess: u32,
}

/// Calls to a backend, for the test to read.
#[derive(Debug, Default)]
struct Asked {
    started: u64,
    killed: Vec<RequestId>,
}

struct Scripted {
    script: Script,
    asked: Arc<Mutex<Asked>>,
    sequences: Vec<Sequence>,
    step: Option<(SimTime, SimTime)>,
    steps: u64,
}

struct Sequence {
    request: EngineRequest,
    arrived: SimTime,
    sent: u32,
}

impl Scripted {
    fn boxed(script: Script) -> (Box<dyn Backend>, Arc<Mutex<Asked>>) {
        let asked = Arc::<Mutex<Asked>>::default();
        let backend = Scripted {
            script,
            asked: asked.clone(),
            sequences: Vec::new(),
            step: None,
            steps: 0,
        };
        (Box::new(backend), asked)
    }
}

impl Backend for Scripted {
    fn start(&mut self, now: SimTime, request: EngineRequest, _: Role) -> Result<(), Refused> {
        if let Some((_, reason)) = self.script.refuses.filter(|r| r.0 == request.seed) {
            let message = format!("seed {} is refused", request.seed);
            return Err(Refused { reason, message });
        }
        self.asked.lock().unwrap().started += 1;
        self.sequences.push(Sequence {
            request,
            arrived: now,
            sent: 0,
        });
        Ok(())
    }

    fn kill(&mut self, id: RequestId) -> Option<u32> {
        let at = self.sequences.iter().position(|s| s.request.id == id)?;
        self.sequences.remove(at);
        self.asked.lock().unwrap().killed.push(id);
        Some(0)
    }

    fn receive(&mut self, _: RequestId) -> bool {
        false
    }

    fn release(&mut self, _: RequestId) -> bool {
        false
    }

    fn begin_step(&mut self, now: SimTime, _: &mut Vec<Reserved>) -> Result<Option<SimTime>, Dead> {
        if self.sequences.is_empty() {
            return Ok(None);
        }
        if self.script.dies_at == Some((self.steps, false)) {
            return Err(Dead("out of luck".into()));
        }
        let end = if self.script.stalls_at == Some(self.steps) {
            SimTime::MAX
        } else {
            now + 1_000_000
        };
        self.step = Some((now, end));
        Ok(Some(end))
    }

    fn finish_step(&mut self, out: &mut PassOutput) -> Result<(), Dead> {
        out.clear();
        (out.start, out.end) = self.step.take().expect("a step was begun");
        let number = self.steps;
        self.steps += 1;
        if self.script.dies_at == Some((number, true)) {
            return Err(Dead("out of luck".into()));
        }
        let per_step = &self.script.per_step;
        let count = per_step
            .get(to_usize(number) % per_step.len().max(1))
            .map_or(1, |&n| n);
        let vocab = vocab();
        for s in &mut self.sequences {
            let max = s.request.params.max_tokens + self.script.excess;
            let tokens: Vec<TokenId> = (s.sent..max.min(s.sent + to_u32(count)))
                .map(|at| output_token(&vocab, s.request.seed, at))
                .collect();
            out.tokens.push_all(s.request.id, &tokens);
            if s.sent == 0 && !tokens.is_empty() {
                out.first.push(FirstToken {
                    id: s.request.id,
                    cached_tokens: 1,
                    lower: LowerHits::default(),
                    arrived: s.arrived,
                    admitted: s.arrived,
                    first_pass_start: out.start,
                });
            }
            s.sent += to_u32(tokens.len());
            if s.sent == max {
                out.finished.push(Finished {
                    id: s.request.id,
                    reason: FinishReason::Length,
                    usage: Usage {
                        prompt_tokens: s.request.prompt.len(),
                        cached_tokens: 1,
                        output_tokens: s.sent,
                        preemptions: 0,
                    },
                });
            }
        }
        out.token_count = to_u32(out.tokens.count());
        out.sequence_count = to_u32(out.tokens.sequences());
        let excess = self.script.excess;
        self.sequences
            .retain(|s| s.sent < s.request.params.max_tokens + excess);
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    fn stats(&self) -> Stats {
        Stats {
            running: to_u32(self.sequences.len()),
            passes: self.steps,
            ..Stats::default()
        }
    }

    fn max_len(&self) -> u32 {
        1 << 20
    }

    fn heartbeat(&mut self, _: &mut ForwardPassMetrics) {}

    fn take_kv(&mut self, _: &mut KvDelta) -> bool {
        false
    }

    fn kv_snapshot(&self, out: &mut KvDelta) {
        out.ops.clear();
    }
}

/// One worker per script, all on one thread.
fn start(setup: Setup, scripts: Vec<Script>) -> (Rig, Vec<Arc<Mutex<Asked>>>) {
    let (specs, asked) = (0..)
        .map(WorkerId)
        .zip(scripts)
        .map(|(worker, script)| {
            let (backend, asked) = Scripted::boxed(script);
            let spec = WorkerSpec {
                worker,
                ranks: vec![backend],
                startup_s: 0.0,
            };
            (spec, asked)
        })
        .unzip();
    (setup.start_ready(specs), asked)
}

fn steps_of(counts: &[usize]) -> Script {
    Script {
        per_step: counts.to_vec(),
        ..Script::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// For any steps, each stream gets its tokens in order, its counts, and one end.
    #[test]
    fn any_number_of_tokens_per_step_arrives_in_order(
        per_step in prop::collection::vec(1usize..=5, 1..6),
        lengths in prop::collection::vec(1u32..40, 1..12),
        shards in 1usize..3,
        frame_words in prop::sample::select(vec![16usize, 64, 4096]),
    ) {
        // The thread waits for a shard whose frame is full, and this test reads one shard at a time.
        let frame_words = if shards == 1 { frame_words } else { PlaneLimits::default().frame_words };
        let setup = Setup {
            shards,
            limits: PlaneLimits { frame_words, ..PlaneLimits::default() },
            ..Setup::default()
        };
        let (mut rig, _) = start(setup, vec![steps_of(&per_step), steps_of(&[1])]);
        let mut sent = Vec::new();
        for (n, &osl) in lengths.iter().enumerate() {
            let shard = n % shards;
            let request = Shard::request(&[1, 2, 3], osl, n as u64);
            let addr = rig.shards[shard].start(rank(n as u32 % 2), request);
            sent.push((shard, addr, n as u64, osl));
        }
        rig.shards.iter_mut().for_each(Shard::read_all);
        for (shard, addr, seed, osl) in sent {
            let answer = rig.shards[shard].answer(addr);
            prop_assert_eq!(&answer.tokens, &expected(seed, osl as usize));
            let end = answer.end.unwrap();
            prop_assert_eq!(end.usage.completion_tokens, osl);
            prop_assert_eq!(end.reason, FinishReason::Length);
        }
        let generated: u64 = rig.set.ranks().iter().map(|r| r.generation_tokens.get()).sum();
        prop_assert_eq!(generated, lengths.iter().map(|&n| u64::from(n)).sum::<u64>());
    }

    /// Credit that ends within a step holds the rest of the step back, and nothing overtakes it.
    #[test]
    fn credit_that_ends_within_a_step_holds_the_rest_back(
        per_step in prop::collection::vec(1usize..=5, 1..4),
        osl in 1u32..30,
        first_credit in 0u32..12,
        credits in prop::collection::vec(1u32..9, 30),
    ) {
        let (mut rig, _) = start(Setup::default(), vec![steps_of(&per_step)]);
        let shard = &mut rig.shards[0];
        let addr = shard.start_with_credit(rank(0), Shard::request(&[1], osl, 5), 4 * first_credit);
        let mut granted = first_credit;
        for credit in credits {
            let open = granted.min(osl) as usize;
            shard.read_until(|shard| shard.answer(addr).tokens.len() >= open);
            prop_assert!(shard.answer(addr).tokens.len() <= granted as usize);
            if granted >= osl {
                break;
            }
            granted += credit;
            let more = ToWorker::Credit { rank: rank(0), addr, bytes: 4 * credit };
            shard.port.send(more).unwrap();
        }
        shard.read_all();
        let answer = shard.answer(addr);
        prop_assert_eq!(&answer.tokens, &expected(5, osl as usize));
        prop_assert_eq!(answer.end.unwrap().usage.completion_tokens, osl);
    }
}

#[test]
fn a_kill_within_a_step_of_several_tokens_stops_the_stream_alone() {
    let slow = Setup {
        timing: LiveTiming::default(),
        ..Setup::default()
    };
    let stalls = Script {
        stalls_at: Some(2),
        ..steps_of(&[3])
    };
    let (mut rig, asked) = start(slow, vec![stalls]);
    let shard = &mut rig.shards[0];
    let killed = shard.start(rank(0), Shard::request(&[1], 100, 1));
    let stopped = shard.start(rank(0), Shard::request(&[2], 100, 2));
    // The third step never ends; requests may have missed the first.
    shard.read_until(|shard| shard.answer(stopped).tokens.len() >= 3);
    until(|| rig.set.ranks()[0].passes.get() == 2);
    for (addr, kill) in [(killed, true), (stopped, false)] {
        let rank = rank(0);
        let message = if kill {
            ToWorker::Kill { rank, addr }
        } else {
            ToWorker::Stop { rank, addr }
        };
        shard.port.send(message).unwrap();
    }
    shard.read_until(|shard| shard.answer(stopped).is_over());
    let end = shard.answer(stopped).end.unwrap();
    assert_eq!(end.reason, FinishReason::Abort);
    assert_eq!(
        end.usage.completion_tokens as usize,
        shard.answer(stopped).tokens.len()
    );
    assert!(!shard.answer(killed).is_over());
    let ids = [killed, stopped].map(RequestId::from);
    assert_eq!(asked[0].lock().unwrap().killed, ids);
}

#[test]
fn a_backend_that_refuses_gives_its_own_reason() {
    for reason in RefusalReason::ALL {
        let script = Script {
            refuses: Some((7, reason)),
            ..Script::default()
        };
        let (mut rig, asked) = start(Setup::default(), vec![script]);
        let shard = &mut rig.shards[0];
        let refused = shard.start(rank(0), Shard::request(&[1], 3, 7));
        let taken = shard.start(rank(0), Shard::request(&[1], 3, 8));
        shard.read_all();
        let expected_refusal = (reason, "seed 7 is refused".to_owned());
        assert_eq!(shard.refusal(refused), expected_refusal);
        assert_eq!(shard.answer(taken).tokens, expected(8, 3));
        assert_eq!(asked[0].lock().unwrap().started, 1);
        assert_eq!(rig.set.ranks()[0].refused.get(), 1);
    }
}

#[test]
fn a_step_that_never_ends_holds_no_other_rank_up() {
    let stalls = Script {
        stalls_at: Some(0),
        ..Script::default()
    };
    let setup = Setup {
        timing: LiveTiming {
            speedup: 1e6,
            ..LiveTiming::default()
        },
        ..Setup::default()
    };
    let (mut rig, _) = start(setup, vec![stalls, steps_of(&[2])]);
    let shard = &mut rig.shards[0];
    let stuck = shard.start(rank(0), Shard::request(&[1], 5, 1));
    let answered = shard.start(rank(1), Shard::request(&[1], 50, 2));
    shard.read_until(|shard| shard.answer(answered).is_over());
    assert_eq!(shard.answer(answered).tokens, expected(2, 50));
    assert!(shard.answer(stuck).tokens.is_empty());
    rig.set.shutdown().unwrap();
}

/// Streams with and without a token get one refusal each, which sends the latter elsewhere; other ranks
/// of the thread continue; the worker is reported, and takes no more requests.
fn check_death(at_end: bool, step: u64) {
    let dies = Script {
        dies_at: Some((step, at_end)),
        ..steps_of(&[2])
    };
    let (mut rig, _) = start(Setup::default(), vec![dies, steps_of(&[2])]);
    let shard = &mut rig.shards[0];
    let lost: Vec<StreamAddr> = (0..3)
        .map(|seed| shard.start(rank(0), Shard::request(&[1], 1_000, seed)))
        .collect();
    let other = shard.start(rank(1), Shard::request(&[1], 100, 9));
    shard.read_all();
    for &addr in &lost {
        let (reason, message) = shard.refusal(addr);
        assert!(reason == RefusalReason::Stopping || reason == RefusalReason::NotReady);
        assert!(message.contains("w0"), "{message}");
    }
    assert!(
        lost.iter()
            .any(|&addr| shard.refusal(addr).1.contains("out of luck")),
        "the cause is given"
    );
    assert_eq!(shard.answer(other).tokens, expected(9, 100));
    assert_eq!(*rig.ready.lock().unwrap(), [WorkerId(1)]);
    assert!(!rig.set.ranks()[0].is_ready() && rig.set.ranks()[1].is_ready());
    let late = shard.start(rank(0), Shard::request(&[1], 5, 1));
    shard.read_all();
    assert_eq!(shard.refusal(late).0, RefusalReason::NotReady);
    rig.set.shutdown().unwrap();
}

#[test]
fn a_backend_that_dies_ends_its_streams_and_no_others() {
    for at_end in [false, true] {
        for step in [0, 1, 7] {
            check_death(at_end, step);
        }
    }
}

#[test]
fn turns_of_several_tokens_per_step_make_one_conversation() {
    let (mut rig, _) = start(Setup::default(), vec![steps_of(&[3, 1])]);
    let shard = &mut rig.shards[0];
    let addr = shard.start_duplex(rank(0), Shard::request(&[1, 2], 5, 3));
    shard.read_until(|shard| shard.answer(addr).turns.len() == 1);
    assert_eq!(shard.answer(addr).tokens, expected(3, 5));
    shard.send_input(addr, rank(0), &[4, 5], true, true);
    shard.read_all();
    let end = shard.answer(addr).end.unwrap();
    assert_eq!(end.usage.completion_tokens, 10);
    assert_eq!(end.usage.prompt_tokens, 4);
    assert_eq!(shard.answer(addr).tokens.len(), 10);
}
