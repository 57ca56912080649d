//! All interleavings of a CPU that queues a task with one that becomes idle. The kernel inserts a task
//! after `ops.enqueue` has returned, so during the callback the task is not yet in the queue.

/// How an idle CPU is woken for the task, in the order in which the ways are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The task was taken without a wake-up.
    Taken,
    /// By the timer, which reads the queue's length from the kernel.
    ByTimer,
    /// Not at all.
    Lost,
}

#[derive(Clone, Copy, Debug)]
struct Rules {
    /// An empty queue is remembered as empty at the insertion count read before.
    remembers_empty: bool,
    /// A CPU that becomes idle compares the count with that before its look, and looks again.
    compares_count: bool,
    /// The task is in the queue before it is counted, as without deferral.
    inserts_first: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    queued: bool,
    taken: bool,
    idle: bool,
    kicked: bool,
    put: u32,
    empty_at: u32,
    seen: u32,
    enqueuer: usize,
    idler: usize,
}

/// `ops.enqueue` counts, looks for an idle CPU, and returns; the insertion happens last.
fn enqueue_step(s: &mut State, rules: Rules) {
    let order = if rules.inserts_first {
        [2, 0, 1]
    } else {
        [0, 1, 2]
    };
    match order[s.enqueuer] {
        0 => s.put += 1,
        1 => s.kicked = std::mem::take(&mut s.idle),
        _ => s.queued = true,
    }
    s.enqueuer += 1;
}

const ASLEEP: usize = 4;

fn idle_step(s: &mut State, rules: Rules) {
    match s.idler {
        0 => s.seen = s.put,
        1 => {
            let looks = !(rules.remembers_empty && s.put == s.empty_at);
            if looks && s.queued {
                (s.queued, s.taken) = (false, true);
            } else if looks && rules.remembers_empty {
                s.empty_at = s.seen;
            }
        }
        2 => s.idle = true,
        3 => {
            let again = if rules.remembers_empty {
                s.put != s.empty_at
            } else {
                rules.compares_count && s.put != s.seen
            };
            if again {
                s.idler = 0;
                return;
            }
        }
        // A kick is carried out after the insertion.
        _ => {
            (s.kicked, s.idler) = (false, 0);
            return;
        }
    }
    s.idler += 1;
}

/// Runs every interleaving and counts how they end.
fn explore(s: State, rules: Rules, ends: &mut [u32; 3]) {
    let enqueues = s.enqueuer < 3;
    let runs = !s.taken && (s.idler < ASLEEP || (s.kicked && !enqueues));
    if enqueues {
        let mut next = s;
        enqueue_step(&mut next, rules);
        explore(next, rules, ends);
    }
    // A CPU that would look repeatedly while an insertion is unfinished waits for it instead.
    if runs && !(enqueues && s.idler == 0 && s.seen == s.put && s.put > 0) {
        let mut next = s;
        idle_step(&mut next, rules);
        explore(next, rules, ends);
    } else if !enqueues {
        let found = if s.taken {
            Found::Taken
        } else if !rules.remembers_empty || s.put != s.empty_at {
            Found::ByTimer
        } else {
            Found::Lost
        };
        ends[found as usize] += 1;
    }
}

fn ends_of(rules: Rules) -> [u32; 3] {
    let mut ends = [0; 3];
    explore(State::default(), rules, &mut ends);
    ends
}

#[test]
fn a_queue_remembered_as_empty_loses_a_task_whose_insertion_is_deferred() {
    let rules = Rules {
        remembers_empty: true,
        compares_count: false,
        inserts_first: false,
    };
    assert!(ends_of(rules)[Found::Lost as usize] > 0);
    let rules = Rules {
        inserts_first: true,
        ..rules
    };
    let [taken, by_timer, lost] = ends_of(rules);
    assert!(
        taken > 0 && by_timer == 0 && lost == 0,
        "which is what it was made for"
    );
}

#[test]
fn no_task_is_lost_and_few_are_left_to_the_timer() {
    let blind = Rules {
        remembers_empty: false,
        compares_count: false,
        inserts_first: false,
    };
    let rules = Rules {
        compares_count: true,
        ..blind
    };
    let (blind, ours) = (ends_of(blind), ends_of(rules));
    let share =
        |e: [u32; 3]| f64::from(e[Found::ByTimer as usize]) / f64::from(e.iter().sum::<u32>());
    assert_eq!(ours[Found::Lost as usize], 0);
    assert!(ours[Found::Taken as usize] > 0);
    assert!(share(ours) < share(blind), "{ours:?} {blind:?}");
}
