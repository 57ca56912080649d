//! Random scripts of inputs. After every action the rig asserts that a request ends once, that its parts
//! are where they were sent, and that no part remains after its end. These tests assert that every request ends.

use proptest::prelude::*;
use slipstream_base::WorkerId;
use slipstream_config::cluster::HandOver;

use crate::rig::{End, Rig};

#[derive(Clone, Copy, Debug)]
enum Op {
    Submit { len: u32, to: Option<u8> },
    Progress { of: u8 },
    Fail { of: u8, which: u8, how: u8 },
    Cancel { of: u8 },
    Crash { worker: u8 },
    Restart { worker: u8 },
    Wait { ns: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1u32..200, prop::option::weighted(0.2, any::<u8>()))
            .prop_map(|(len, to)| Op::Submit { len, to }),
        8 => any::<u8>().prop_map(|of| Op::Progress { of }),
        2 => (any::<u8>(), any::<u8>(), 0u8..5).prop_map(|(of, which, how)| Op::Fail { of, which, how }),
        1 => any::<u8>().prop_map(|of| Op::Cancel { of }),
        1 => any::<u8>().prop_map(|worker| Op::Crash { worker }),
        1 => any::<u8>().prop_map(|worker| Op::Restart { worker }),
        1 => (0u64..3_000_000).prop_map(|ns| Op::Wait { ns }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_request_ends_once_and_leaves_nothing(
        push: bool,
        serve in 1u32..4,
        prefill in 0u32..3,
        queue_max in 0u32..4,
        resumes_max in 0u32..4,
        views: bool,
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let transfer = if push { HandOver::Push } else { HandOver::Pull };
        let mut rig = Rig::new(transfer, serve, prefill, |config| {
            config.queue_max = queue_max;
            config.resumes_max = resumes_max;
            config.busy_prefill_tokens = 150;
            config.view_interval_ms = f64::from(u8::from(views));
        });
        let workers = serve + prefill;
        for op in ops {
            let open = rig.open();
            let pick = |of: u8| (!open.is_empty()).then(|| open[usize::from(of) % open.len()]);
            match op {
                Op::Submit { len, to } => {
                    rig.submit_to(len, to.map(|to| WorkerId(u32::from(to) % serve)));
                }
                Op::Progress { of } => {
                    if let Some(id) = pick(of) {
                        rig.progress(id);
                    }
                }
                Op::Fail { of, which, how } => {
                    if let Some(id) = pick(of) {
                        rig.fail_part(id, which.into(), how);
                    }
                }
                Op::Cancel { of } => {
                    if let Some(id) = pick(of) {
                        rig.cancel(id);
                    }
                }
                Op::Crash { worker } => rig.crash(WorkerId(u32::from(worker) % workers)),
                Op::Restart { worker } => rig.restart(WorkerId(u32::from(worker) % workers)),
                Op::Wait { ns } => rig.wait(ns),
            }
        }
        // Once failures stop, every request is answered or was rejected before.
        (0..workers).for_each(|worker| rig.restart(WorkerId(worker)));
        let left = rig.open();
        for _ in 0..10 * (left.len() + 1) {
            rig.wait(2_000_000);
            rig.open().into_iter().for_each(|id| rig.progress(id));
        }
        prop_assert_eq!(rig.open(), Vec::<u32>::new(), "all requests end");
        for id in left {
            prop_assert!(matches!(rig.ends[&id], End::Answered | End::Rejected), "{:?}", rig.ends[&id]);
        }
        prop_assert_eq!(rig.charged(), 0);
        prop_assert_eq!(rig.dispatch.queued(), 0);
        prop_assert!(rig.dispatch.poll_action().is_none());
    }
}
