//! Tests of single rules.

use slipstream_base::{SimTime, WorkerId};
use slipstream_config::cluster::HandOver;
use slipstream_dispatch::{Action, Role};

use crate::rig::{ANSWERED, End, LATENCY_NS, Rig};

/// The actions since `from`, abbreviated.
fn steps(rig: &Rig, from: usize) -> Vec<String> {
    let role = |role: Role| format!("{role:?}").to_lowercase();
    rig.log[from..]
        .iter()
        .map(|action| match action {
            Action::Start {
                role: r, rank, at, ..
            } => format!("start {} {} at {}", role(*r), rank.worker, at.0),
            Action::Kill { role: r, rank, .. } => format!("kill {} {}", role(*r), rank.worker),
            Action::Transfer {
                from,
                to,
                tokens,
                at,
                ..
            } => format!("transfer {tokens} {from} {to} at {}", at.0),
            Action::CancelTransfer { .. } => "cancel transfer".into(),
            Action::Receive { rank, .. } => format!("receive {}", rank.worker),
            Action::Release { rank, .. } => format!("release {}", rank.worker),
            Action::Rejected { .. } => "rejected".into(),
            Action::Lost { worker, begun, .. } => format!("lost {worker} begun={begun}"),
            Action::Refused { worker, .. } => format!("refused {worker}"),
        })
        .collect()
}

#[test]
fn with_pull_the_prompt_comes_first_and_then_the_room() {
    let mut rig = Rig::new(HandOver::Pull, 1, 1, |_| {});
    rig.now = SimTime(1_000);
    let id = rig.submit(100);
    (0..3).for_each(|_| rig.progress(id));
    assert_eq!(
        steps(&rig, 0),
        [
            "start prefill w1 at 1000".to_string(),
            format!("start decode w0 at {}", 1_000 + 2 * LATENCY_NS),
            format!("transfer 84 w1 w0 at {}", 1_000 + LATENCY_NS),
            "receive w0".into(),
            "release w1".into(),
        ]
    );
    (0..2).for_each(|_| rig.progress(id));
    assert_eq!(rig.ends[&id], End::Answered);
    assert_eq!(rig.charged(), 0);
}

#[test]
fn with_push_the_room_comes_first_and_then_the_prompt() {
    let mut rig = Rig::new(HandOver::Push, 1, 1, |_| {});
    rig.now = SimTime(1_000);
    let id = rig.submit(100);
    (0..3).for_each(|_| rig.progress(id));
    assert_eq!(
        steps(&rig, 0),
        [
            "start decode w0 at 1000".to_string(),
            format!("start prefill w1 at {}", 1_000 + LATENCY_NS),
            "transfer 84 w1 w0 at 1000".into(),
            "receive w0".into(),
            "release w1".into(),
        ]
    );
}

#[test]
fn a_short_prompt_is_computed_where_it_is_decoded() {
    let mut rig = Rig::new(HandOver::Pull, 1, 1, |_| {});
    rig.submit(63);
    assert_eq!(steps(&rig, 0), ["start both w0 at 0"]);
}

#[test]
fn a_request_that_must_stay_whole_is_computed_where_it_is_decoded() {
    let mut rig = Rig::new(HandOver::Pull, 1, 1, |_| {});
    rig.submit_with(100, |request| request.whole = true);
    assert_eq!(steps(&rig, 0), ["start both w0 at 0"]);
}

#[test]
fn a_failed_prefill_leaves_the_decode_rank_to_compute_the_prompt() {
    for progress in 0..=2 {
        let mut rig = Rig::new(HandOver::Pull, 1, 1, |_| {});
        let id = rig.submit(100);
        (0..progress).for_each(|_| rig.progress(id));
        let from = rig.log.len();
        rig.fail_prefill(id);
        let steps = steps(&rig, from);
        assert_eq!(steps.last().unwrap(), "start both w0 at 0");
        assert!(steps.contains(&"kill prefill w1".into()), "{steps:?}");
        // It is no retry: the decode rank may fail it still.
        let decode = rig.holder(id, 0).unwrap().worker;
        rig.crash(decode);
        assert!(!rig.ends.contains_key(&id) || rig.ends[&id] == End::Rejected);
        let mut rig = Rig::new(HandOver::Pull, 2, 1, |_| {});
        let id = rig.submit(100);
        (0..progress).for_each(|_| rig.progress(id));
        rig.fail_prefill(id);
        let decode = rig.holder(id, 0).unwrap().worker;
        rig.crash(decode);
        assert_eq!(
            rig.dispatch.prefill_rank(id),
            None,
            "nor is it sent there again"
        );
        finish(&mut rig, id);
    }
}

#[test]
fn a_request_without_a_token_moves_once_and_is_then_lost() {
    let mut rig = Rig::new(HandOver::Pull, 3, 0, |_| {});
    let id = rig.submit(10);
    let first = rig.holder(id, 0).unwrap().worker;
    rig.crash(first);
    let second = rig.holder(id, 0).unwrap().worker;
    assert_ne!(first, second);
    rig.restart(first);
    rig.crash(second);
    assert_eq!(rig.ends[&id], End::Lost { begun: false });
    assert_eq!(rig.charged(), 0);
}

/// Crashes the worker that generates the answer of request `id`.
fn crash_under(rig: &mut Rig, id: u32) -> WorkerId {
    let worker = rig.dispatch.decode_rank(id).unwrap().worker;
    rig.crash(worker);
    worker
}

fn finish(rig: &mut Rig, id: u32) {
    for _ in 0..10 {
        if rig.ends.contains_key(&id) {
            break;
        }
        rig.progress(id);
    }
    assert_eq!(rig.ends[&id], End::Answered);
    assert_eq!(rig.charged(), 0);
}

#[test]
fn an_answer_that_has_begun_is_lost_with_its_worker_unless_it_may_resume() {
    let lost = |resumes_max, set: fn(&mut slipstream_dispatch::Request)| {
        let mut rig = Rig::new(HandOver::Pull, 2, 0, |config| {
            config.resumes_max = resumes_max;
        });
        let id = rig.submit_with(10, set);
        rig.progress(id);
        crash_under(&mut rig, id);
        rig.ends.get(&id).copied()
    };
    assert_eq!(lost(1, |_| {}), None);
    assert_eq!(lost(0, |_| {}), Some(End::Lost { begun: true }));
    assert_eq!(
        lost(1, |request| request.resumes = false),
        Some(End::Lost { begun: true })
    );
    assert_eq!(
        lost(1, |request| request.streams_input = true),
        Some(End::Lost { begun: true }),
        "its later input is at the worker"
    );
}

#[test]
fn an_answer_continues_up_to_its_limit_and_on_workers_that_failed_it_before() {
    let mut rig = Rig::new(HandOver::Pull, 2, 0, |config| config.resumes_max = 3);
    let id = rig.submit(10);
    for resumed in 1..=3 {
        rig.progress(id);
        let gone = crash_under(&mut rig, id);
        assert!(!rig.ends.contains_key(&id), "time {resumed}");
        assert_ne!(rig.dispatch.decode_rank(id).unwrap().worker, gone);
        assert_eq!(rig.dispatch.resumed(id), resumed);
        // There are two workers: the third time needs the first again.
        rig.restart(gone);
    }
    rig.progress(id);
    crash_under(&mut rig, id);
    assert_eq!(rig.ends[&id], End::Lost { begun: true });
    assert_eq!(rig.charged(), 0);
}

#[test]
fn a_worker_that_fails_before_it_continues_an_answer_counts_too() {
    let mut rig = Rig::new(HandOver::Pull, 2, 0, |config| config.resumes_max = 2);
    let id = rig.submit(10);
    rig.progress(id);
    let first = crash_under(&mut rig, id);
    rig.restart(first);
    let second = crash_under(&mut rig, id); // no token of it
    rig.restart(second);
    let third = rig.dispatch.decode_rank(id).unwrap().worker;
    assert_eq!(third, first, "it is back, and no other is left");
    rig.fail_part(id, 0, 0); // it may not go to another
    assert_eq!(rig.ends[&id], End::Refused);
}

#[test]
fn the_rest_of_an_answer_has_its_prompt_and_the_tokens_so_far_computed_and_transferred() {
    for (transfer, order) in [
        (HandOver::Pull, ["prefill", "decode"]),
        (HandOver::Push, ["decode", "prefill"]),
    ] {
        // The prompt alone is too short to be computed elsewhere.
        let mut rig = Rig::new(transfer, 2, 1, |config| {
            config.remote_prefill_tokens_min = 64;
        });
        let id = rig.submit(60);
        rig.progress(id);
        let from = rig.log.len();
        crash_under(&mut rig, id);
        (0..2).for_each(|_| rig.progress(id));
        let found = steps(&rig, from);
        assert!(
            found[0].starts_with(&format!("start {}", order[0])),
            "{found:?}"
        );
        assert!(
            found[1].starts_with(&format!("start {}", order[1])),
            "{found:?}"
        );
        // 16 of them are cached where it is decoded.
        let tokens = 60 + ANSWERED - 16;
        assert!(
            found[2].starts_with(&format!("transfer {tokens} ")),
            "{found:?}"
        );
        finish(&mut rig, id);
    }
}

#[test]
fn an_answer_that_continues_survives_the_loss_of_either_worker_at_each_stage() {
    for transfer in [HandOver::Pull, HandOver::Push] {
        for progress in 0..4 {
            for of_prefill in [false, true] {
                let mut rig = Rig::new(transfer, 3, 3, |_| {});
                let id = rig.submit(100);
                (0..4).for_each(|_| rig.progress(id));
                assert!(rig.begun.contains(&id));
                crash_under(&mut rig, id);
                (0..progress).for_each(|_| rig.progress(id));
                match rig.dispatch.prefill_rank(id) {
                    Some(prefill) if of_prefill => rig.crash(prefill.worker),
                    _ => drop(crash_under(&mut rig, id)),
                }
                assert_eq!(rig.dispatch.resumed(id), 2);
                finish(&mut rig, id);
            }
        }
    }
}

#[test]
fn an_answer_that_continues_can_be_canceled_and_leaves_nothing() {
    for progress in 0..3 {
        let mut rig = Rig::new(HandOver::Pull, 2, 1, |_| {});
        let id = rig.submit(100);
        (0..4).for_each(|_| rig.progress(id));
        crash_under(&mut rig, id);
        (0..progress).for_each(|_| rig.progress(id));
        rig.cancel(id);
        assert_eq!(rig.charged(), 0);
    }
}

#[test]
fn an_answer_waits_for_room_elsewhere_if_the_queue_has_a_place() {
    let busy = |queue_max| {
        let mut rig = Rig::new(HandOver::Pull, 2, 0, |config| {
            config.queue_max = queue_max;
            config.busy_prefill_tokens = 50;
        });
        let id = rig.submit(51);
        rig.progress(id);
        let holder = rig.dispatch.decode_rank(id).unwrap().worker;
        let other = rig.submit_to(51, Some(WorkerId(1 - holder.0)));
        rig.crash(holder);
        (rig, id, other)
    };
    let (mut rig, id, other) = busy(1);
    assert_eq!(rig.dispatch.queued(), 1);
    rig.progress(other);
    assert_eq!(rig.dispatch.queued(), 0);
    rig.progress(id);
    rig.progress(id);
    assert_eq!(rig.ends[&id], End::Answered);
    let (rig, id, _) = busy(0);
    assert_eq!(rig.ends[&id], End::Rejected, "the queue is full");
    let last = rig.log.iter().rev().find(|action| action.id() == id);
    let Some(Action::Rejected { failed, .. }) = last else {
        panic!("{last:?}");
    };
    assert!(failed.is_some(), "the error names the worker that was lost");
}

#[test]
fn the_client_that_named_its_worker_gets_the_rest_from_another() {
    let mut rig = Rig::new(HandOver::Pull, 2, 0, |_| {});
    let id = rig.submit_to(10, Some(WorkerId(1)));
    rig.progress(id);
    assert_eq!(crash_under(&mut rig, id), WorkerId(1));
    finish(&mut rig, id);
}

#[test]
fn reports_of_the_worker_that_was_lost_change_nothing() {
    let mut rig = Rig::new(HandOver::Pull, 2, 0, |_| {});
    let id = rig.submit(10);
    rig.progress(id);
    let gone = crash_under(&mut rig, id);
    let from = rig.log.len();
    rig.give_up(id, gone);
    assert_eq!(steps(&rig, from), [""; 0]);
    assert_eq!(rig.dispatch.resumed(id), 1);
}

#[test]
fn a_request_whose_input_was_sent_is_bound_to_its_worker() {
    let mut rig = Rig::new(HandOver::Pull, 2, 0, |_| {});
    let id = rig.submit(10);
    rig.dispatch.on_input_sent(id);
    rig.crash(rig.holder(id, 0).unwrap().worker);
    assert_eq!(rig.ends[&id], End::Lost { begun: false });
}

#[test]
fn a_prefill_worker_that_disappears_takes_no_answer_with_it() {
    for transfer in [HandOver::Pull, HandOver::Push] {
        for progress in 0..3 {
            let mut rig = Rig::new(transfer, 2, 2, |_| {});
            let id = rig.submit(100);
            (0..progress).for_each(|_| rig.progress(id));
            let Some(prefill) = rig.dispatch.prefill_rank(id) else {
                unreachable!("its prompt has not arrived yet");
            };
            rig.crash(prefill.worker);
            assert!(
                !rig.ends.contains_key(&id),
                "{transfer:?} after {progress} steps"
            );
            while !rig.ends.contains_key(&id) {
                rig.progress(id);
            }
            assert_eq!(rig.ends[&id], End::Answered);
            assert_eq!(rig.charged(), 0);
        }
    }
}

#[test]
fn a_full_fleet_queues_in_order_and_then_rejects() {
    let mut rig = Rig::new(HandOver::Pull, 1, 0, |config| {
        config.queue_max = 2;
        config.busy_prefill_tokens = 50;
    });
    let ids: Vec<u32> = (0..4).map(|_| rig.submit(51)).collect();
    assert_eq!(rig.dispatch.queued(), 2);
    assert_eq!(rig.ends.get(&ids[3]), Some(&End::Rejected));
    rig.progress(ids[0]); // the first token frees its prefill
    assert!(
        rig.holder(ids[1], 0).is_some(),
        "the first in the queue is dispatched"
    );
    assert!(rig.holder(ids[2], 0).is_none());
    let late = rig.submit(10);
    assert!(
        rig.holder(late, 0).is_none(),
        "no request overtakes the queue"
    );
    rig.cancel(ids[2]);
    rig.progress(ids[1]);
    assert!(
        rig.holder(late, 0).is_some(),
        "a canceled one holds no place"
    );
}

#[test]
fn a_request_for_one_worker_does_not_hold_up_those_for_any() {
    let mut rig = Rig::new(HandOver::Pull, 2, 0, |config| {
        config.queue_max = 20;
        config.busy_prefill_tokens = 50;
    });
    let first = rig.submit(51);
    let busy = rig.holder(first, 0).unwrap().worker;
    let named = rig.submit_to(51, Some(busy));
    assert_eq!((rig.holder(named, 0), rig.dispatch.queued()), (None, 1));
    let free = rig.submit(51);
    assert!(rig.holder(free, 0).is_some_and(|rank| rank.worker != busy));
    // Both are busy now: the next request waits, and the one with a named worker goes first if there is room.
    let last = rig.submit(51);
    assert_eq!(rig.dispatch.queued(), 2);
    rig.progress(first);
    assert!(rig.holder(named, 0).is_some());
    rig.progress(free);
    assert!(rig.holder(last, 0).is_some());
    assert_eq!(
        rig.serve.counters().busy_total,
        0,
        "a look-up is no refusal"
    );
}

#[test]
fn refusals_as_busy_are_counted_once_each() {
    let mut rig = Rig::new(HandOver::Pull, 1, 0, |config| {
        config.queue_max = 1;
        config.busy_prefill_tokens = 50;
    });
    for _ in 0..4 {
        rig.submit(51);
    }
    assert_eq!(rig.serve.counters().busy_total, 2);
}

#[test]
fn a_queue_is_looked_at_again_when_the_router_has_seen_more() {
    let mut rig = Rig::new(HandOver::Pull, 1, 0, |config| {
        config.queue_max = 8;
        config.busy_prefill_tokens = 50;
        config.view_interval_ms = 1.0;
    });
    let first = rig.submit(51);
    let second = rig.submit(51);
    assert!(rig.dispatch.next_timeout().is_some());
    rig.progress(first);
    assert!(
        rig.holder(second, 0).is_none(),
        "the router has not looked yet"
    );
    for _ in 0..3 {
        rig.wait(1_000_000);
    }
    assert!(rig.holder(second, 0).is_some());
    assert_eq!(rig.dispatch.next_timeout(), None);
}

#[test]
fn an_event_of_an_earlier_attempt_changes_nothing() {
    let mut rig = Rig::new(HandOver::Pull, 2, 1, |_| {});
    let id = rig.submit(100);
    (0..2).for_each(|_| rig.progress(id));
    let old = rig.transfers[&id];
    let decode = rig.dispatch.decode_rank(id).unwrap().worker;
    rig.crash(decode);
    assert!(
        !rig.dispatch.on_transferred(id, old),
        "that attempt is over"
    );
    assert!(!rig.dispatch.is_current(id, old));
    assert_eq!(rig.dispatch.failed_on(id), [decode]);
}

#[test]
fn a_refusal_for_good_ends_both_parts() {
    let mut rig = Rig::new(HandOver::Push, 1, 1, |_| {});
    let id = rig.submit(100);
    rig.progress(id);
    let from = rig.log.len();
    rig.fail_part(id, 0, 1); // the prefill worker refuses
    assert_eq!(steps(&rig, from), ["kill decode w0", "refused w1"]);
}

#[test]
fn without_a_worker_the_error_names_the_one_that_failed() {
    let mut rig = Rig::new(HandOver::Pull, 1, 0, |_| {});
    rig.submit(10);
    rig.crash(WorkerId(0));
    let Some(Action::Rejected { failed, error, .. }) = rig.log.last() else {
        panic!("no worker is left: {:?}", rig.log);
    };
    assert_eq!(*failed, Some(WorkerId(0)));
    assert!(error.retry_may_help());
}

#[test]
fn a_frontend_that_restarts_leaves_nothing_at_its_workers() {
    for transfer in [HandOver::Pull, HandOver::Push] {
        let mut rig = Rig::new(transfer, 2, 2, |config| {
            config.queue_max = 20;
            config.busy_prefill_tokens = 150;
        });
        // At each stage of a request at two workers, at one, with a token, and in the queue.
        for steps in 0..5 {
            let id = rig.submit(100);
            for _ in 0..steps {
                rig.progress(id);
            }
        }
        let short = rig.submit(20);
        rig.progress(short);
        for _ in 0..12 {
            rig.submit(60);
        }
        assert!(rig.dispatch.queued() > 0 && rig.dispatch.open() > 4);
        rig.restart_frontend();
        assert_eq!((rig.dispatch.open(), rig.dispatch.queued()), (0, 0));
        assert_eq!(rig.charged(), 0);
        // The next one is served, and steps of earlier attempts are over.
        let id = rig.submit(20);
        (0..2).for_each(|_| rig.progress(id));
        assert_eq!(rig.ends[&id], End::Answered);
    }
}
