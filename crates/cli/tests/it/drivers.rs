//! One script, both drivers of the dispatcher. The twin runs a cluster with faults and records the
//! inputs and decisions of its dispatcher. The frontend then receives the same inputs in the same order,
//! from HTTP clients and engine threads that the test plays. It must make the same decisions and send them.
//! `one_sided` lists the inputs that one driver alone gives, with the tests that cover them.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::TcpStream;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use slipstream_base::{FinishReason, WorkerId};
use slipstream_config::cluster::{self, Cluster, file};
use slipstream_config::doc::Doc;
use slipstream_config::workload_file;
use slipstream_dispatch::journal::{Input, Journal, Line};
use slipstream_dispatch::{Action, Dispatcher, Role, Rules};
use slipstream_frontend::text::TextModel;
use slipstream_frontend::{
    Bound, Frontend, KvNetwork, Limits, Service, ShardPlane, WorkerTransport,
};
use slipstream_planes::{
    End, FirstPass, Flushed, PassFrame, Plane, PlaneLimits, Prologue, Reserved, StreamAddr,
    ThreadPort, ToWorker, Usage,
};
use slipstream_router::{Fleets, Router};
use slipstream_twin::{Options, simulate};

/// No step takes nearly as long; one that does hangs.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    /// The worker vanishes and does not return.
    Crash(u32),
    /// The worker vanishes as one of its GPUs is gone, and does not return.
    Gpu(u32),
    /// The worker takes no new requests, for ever or for some time.
    Drain {
        worker: u32,
        returns: bool,
    },
    /// The worker's steps take longer for some time.
    Slow(u32),
    /// The worker's network interface is slower, or down, for some time.
    Link {
        worker: u32,
        share: f64,
    },
}

impl Fault {
    /// The `[[event]]` of a cluster file.
    fn event(self) -> String {
        let (kind, worker, rest) = match self {
            Fault::None => return String::new(),
            Fault::Crash(worker) => ("crash", worker, String::new()),
            Fault::Gpu(worker) => ("gpu", worker, "until_s = 1000\n".to_owned()),
            Fault::Drain { worker, returns } => {
                let end = if returns { "until_s = 0.5\n" } else { "" };
                ("drain", worker, end.to_owned())
            }
            Fault::Slow(worker) => ("slow", worker, "until_s = 0.6\nfactor = 3\n".to_owned()),
            Fault::Link { worker, share } => {
                ("link", worker, format!("until_s = 0.6\nshare = {share}\n"))
            }
        };
        format!("[[event]]\nkind = \"{kind}\"\nworker = {worker}\nat_s = 0.4\n{rest}")
    }
}

struct Case {
    name: String,
    cluster: String,
    workload: String,
    fault: Fault,
}

/// Variety by number; the same for every run.
fn case(n: u32) -> Case {
    let policies = [
        "round_robin",
        "random",
        "power_of_two",
        "least_requests",
        "least_tokens",
    ];
    let policy = policies[n as usize % policies.len()];
    // With a queue one worker: the twin looks at the queue once everything of a moment has happened, the
    // frontend after each frame. Two workers may end a step at the same moment.
    let queue = n % 4 == 1;
    let apart = !n.is_multiple_of(3) && !queue;
    // A crash hits requests in the order of the driver's numbers, so that one worker may be left to choose
    // from, or the other driver chooses differently for each.
    let crash = match (n / 2) % 4 {
        0 => Some(0),
        1 if apart => Some(1), // the first that computes prompts
        _ => None,
    };
    let (serve, prefill) = match (crash, apart) {
        _ if queue => (1, 0),
        (_, false) => (2, 0),
        (Some(0), true) => (2, 1),
        (Some(_), true) => (1, 2),
        (None, true) => (2, 2),
    };
    let fault = match crash {
        Some(worker) => Fault::Crash(worker),
        None if n.is_multiple_of(4) => Fault::Drain {
            worker: n / 4 % (serve + prefill),
            returns: false,
        },
        None => Fault::None,
    };
    let order = if n.is_multiple_of(2) { "pull" } else { "push" };
    let resumes_max = if (n / 8).is_multiple_of(2) { 3 } else { 0 };
    let mut cluster = format!(
        "[model]\nname = \"test-model\"\n[kv]\nhand_over = \"{order}\"\n[router]\npolicy = \"{policy}\"\n\
         remote_prefill_tokens_min = 64\nseed = {n}\nresumes_max = {resumes_max}\n"
    );
    if queue {
        cluster += "queue_max = 6\nbusy_kv_share = 0.5\n";
    }
    cluster += &rest_of_cluster(serve, prefill);
    cluster += &fault.event();
    Case {
        name: format!("case {n}: {policy} {order} apart={apart} queue={queue} {fault:?}"),
        cluster,
        workload: workload(n),
        fault,
    }
}

/// A case of `fault`, whose pools have two workers each, or one if `queue`.
fn case_of(fault: Fault, order: &str, policy: &str, queue: bool, network: bool) -> Case {
    let (workers, rest) = if queue {
        (1, "queue_max = 16\nbusy_kv_share = 0.5\n")
    } else {
        (2, "")
    };
    let mut cluster = format!(
        "[model]\nname = \"test-model\"\n[kv]\nhand_over = \"{order}\"\n[router]\npolicy = \"{policy}\"\n\
         remote_prefill_tokens_min = 64\nseed = 3\n{rest}"
    );
    cluster += &rest_of_cluster(workers, if queue { 0 } else { workers });
    if network {
        cluster += "[network]\nmode = \"flows\"\n";
    }
    cluster += &fault.event();
    Case {
        name: format!("{policy} {order} queue={queue} {fault:?}"),
        cluster,
        workload: workload(3),
        fault,
    }
}

/// Engines with steps of 10 ms, and pools of so many workers.
fn rest_of_cluster(serve: u32, prefill: u32) -> String {
    let pools = if prefill > 0 {
        format!(
            "[pool.d]\nrole = \"decode\"\nworkers = {serve}\n[pool.p]\nrole = \"prefill\"\nworkers = {prefill}\n"
        )
    } else {
        format!("[pool.main]\nworkers = {serve}\n")
    };
    format!(
        "[engine]\nblock_size = 16\nnum_gpu_blocks = 128\nmax_model_len = 1024\nmax_num_seqs = 16\n\
         max_num_batched_tokens = 64\n{pools}[engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n"
    )
}

fn workload(seed: u32) -> String {
    format!(
        "requests = 32\nseed = {seed}\n[arrival]\nkind = \"poisson\"\nrate_per_s = 50\n\
         [[class]]\nisl = {{ kind = \"uniform\", min = 20, max = 300 }}\nosl = {{ kind = \"uniform\", min = 1, max = 12 }}\n"
    )
}

fn cluster(text: &str) -> Cluster {
    let doc = Doc::parse("cluster.toml", text.as_bytes());
    let read = |path: &Path| std::fs::read(path);
    file::read(doc, read).unwrap_or_else(|e| panic!("{e}")).0
}

/// Inputs and decisions of the twin's dispatcher.
fn twin_lines(cluster: &Cluster, workload: &str) -> Vec<Line> {
    let doc = Doc::parse("workload.toml", workload.as_bytes());
    let workload = workload_file::read(doc).unwrap_or_else(|e| panic!("{e}")).0;
    let journal = Journal::default();
    let options = Options {
        one_queue: true,
        journal: Some(journal.clone()),
        ..Options::default()
    };
    let read = |path: &Path| std::fs::read(path);
    simulate(cluster, &workload, &options, read, &mut ()).unwrap_or_else(|e| panic!("{e}"));
    journal.lines()
}

/// Requests by order of submission, as numbers of drivers are used again.
#[derive(Default)]
struct Names {
    by_id: BTreeMap<u32, usize>,
    submitted: usize,
}

impl Names {
    /// The request, and the line without a driver's own numbers, attempts and times.
    fn name(&mut self, line: &Line) -> (usize, String) {
        let id = match line {
            Line::Input { id, input } => {
                if matches!(input, Input::Submitted { .. }) {
                    self.by_id.insert(*id, self.submitted);
                    self.submitted += 1;
                }
                *id
            }
            Line::Action(action) => action.id(),
            Line::FleetChanged => unreachable!("it is left out"),
        };
        let request = self.by_id[&id];
        let text = match line {
            Line::Input { input, .. } => format!("{input:?}"),
            Line::Action(action) => match action {
                Action::Start { role, rank, .. } => format!("start {role:?} {rank}"),
                Action::Kill { role, rank, .. } => format!("kill {role:?} {rank}"),
                Action::Transfer {
                    from, to, tokens, ..
                } => format!("transfer {tokens} {from} {to}"),
                Action::CancelTransfer { .. } => "cancel transfer".into(),
                Action::Receive { rank, .. } => format!("receive {rank}"),
                Action::Release { rank, .. } => format!("release {rank}"),
                Action::Rejected { error, failed, .. } => format!("rejected {error} {failed:?}"),
                Action::Lost {
                    worker,
                    failed,
                    begun,
                    ..
                } => format!("lost {worker} {failed:?} begun={begun}"),
                Action::Refused { worker, failed, .. } => format!("refused {worker} {failed:?}"),
            },
            Line::FleetChanged => unreachable!("it is left out"),
        };
        (request, format!("{request}: {text}"))
    }
}

/// Something from outside, and what follows from it.
#[derive(Debug)]
struct Step {
    stimulus: Stimulus,
    /// Lines of the journal, requests by order of submission.
    expected: Vec<String>,
    /// The actions among them, with the request.
    actions: Vec<(usize, Action)>,
    /// Requests that a crash hit after their first token, and the tokens that their clients have.
    resumed: Vec<(usize, u32)>,
}

impl Step {
    fn new(stimulus: Stimulus) -> Step {
        Step {
            stimulus,
            expected: Vec::new(),
            actions: Vec::new(),
            resumed: Vec::new(),
        }
    }
}

#[derive(Debug)]
enum Stimulus {
    Submit {
        prompt_tokens: u32,
        max_tokens: u32,
    },
    /// Entries of one worker, in one frame.
    Entries(Vec<(usize, Input)>),
    Crash(WorkerId),
    FleetChanged,
}

/// The twin's lines as steps for the other driver.
fn steps(lines: &[Line]) -> Vec<Step> {
    let mut names = Names::default();
    let mut steps: Vec<Step> = Vec::new();
    // By request: the worker that generates, and the one that computes the prompt.
    let mut at: BTreeMap<usize, [Option<WorkerId>; 2]> = BTreeMap::new();
    let mut worker_of_last = None;
    for line in lines {
        if *line == Line::FleetChanged {
            worker_of_last = None;
            // The queue's reaction to a crash belongs to the step of the crash.
            if let Some(Stimulus::Crash(_)) = steps.last().map(|step| &step.stimulus) {
                continue;
            }
            steps.push(Step::new(Stimulus::FleetChanged));
            continue;
        }
        let (request, text) = names.name(line);
        match line {
            Line::Input { input, .. } => {
                let ranks = at.entry(request).or_default();
                let worker = match input {
                    Input::Prefilled => ranks[1],
                    _ => ranks[0],
                };
                let last = steps.last_mut();
                match (*input, last.map(|last| (&mut last.stimulus, &last.actions))) {
                    // They come by themselves at once, as there is no modelled network.
                    (Input::Transferred, _) => {
                        let found = steps.iter_mut().rev().find(|step| {
                            let sent = |(of, action): &(usize, Action)| {
                                *of == request && matches!(action, Action::Transfer { .. })
                            };
                            step.actions.iter().any(sent)
                        });
                        let step = found.expect("what arrives was sent");
                        step.expected.push(text);
                        continue;
                    }
                    (Input::Resumed { answered }, _) => {
                        let step = steps.last_mut().expect("a crash precedes it");
                        step.resumed.push((request, answered));
                        step.expected.push(text);
                        continue;
                    }
                    (Input::Failed { worker }, Some((Stimulus::Crash(of), _))) if *of == worker => {
                    }
                    (Input::Failed { worker }, _) => {
                        steps.push(Step::new(Stimulus::Crash(worker)));
                    }
                    (
                        Input::Submitted {
                            prompt_tokens,
                            max_tokens,
                        },
                        _,
                    ) => steps.push(Step::new(Stimulus::Submit {
                        prompt_tokens,
                        max_tokens,
                    })),
                    (input, Some((Stimulus::Entries(entries), actions)))
                        if actions.is_empty() && worker_of_last == worker =>
                    {
                        entries.push((request, input));
                    }
                    (input, _) => {
                        steps.push(Step::new(Stimulus::Entries(vec![(request, input)])));
                    }
                }
                worker_of_last = worker;
                steps.last_mut().unwrap().expected.push(text);
            }
            Line::Action(action) => {
                if let Action::Start { role, rank, .. } = action {
                    let role = usize::from(*role == Role::Prefill);
                    at.entry(request).or_default()[role] = Some(rank.worker);
                }
                // An action that follows an arrival belongs to the step of the arrival.
                let arrival = format!("{request}: Transferred");
                let to = matches!(action, Action::Receive { .. } | Action::Release { .. });
                let found = steps
                    .iter_mut()
                    .rev()
                    .find(|step| !to || step.expected.contains(&arrival));
                let step = found.expect("an action follows something");
                step.expected.push(text);
                step.actions.push((request, *action));
            }
            Line::FleetChanged => {}
        }
    }
    for step in &mut steps {
        if matches!(step.stimulus, Stimulus::Crash(_)) {
            sort_by_request(&mut step.expected);
        }
    }
    steps
}

/// A crash hits requests in the order of the driver's numbers, which are its own.
fn sort_by_request(lines: &mut [String]) {
    lines.sort_by_key(|line| line.split(':').next().unwrap().parse::<usize>().unwrap());
}

/// Where a part of a request is.
#[derive(Clone, Copy)]
struct Placed {
    worker: WorkerId,
    addr: StreamAddr,
    role: Role,
    attempt: u8,
}

/// A frontend whose engine threads the test plays, one worker each.
struct Live {
    frontend: Frontend,
    workers: Vec<Option<ThreadPort>>,
    fleets: Fleets,
    journal: Journal,
    names: Names,
    /// Lines of the journal that were compared.
    seen: usize,
    clients: Vec<TcpStream>,
    /// By request and whether it is its prompt's stream.
    placed: BTreeMap<(usize, bool), Placed>,
    /// By request: tokens that its client was sent.
    sent: BTreeMap<usize, u32>,
    /// By request: those that its client had when its worker was lost.
    answered: BTreeMap<usize, u32>,
}

impl Live {
    fn start(cluster: &Cluster) -> Live {
        let fleets = Fleets::of_cluster(cluster).unwrap();
        let workers: u32 = cluster.pools.iter().map(|pool| pool.workers).sum();
        let plane = Plane::new(1, workers as usize, PlaneLimits::default());
        for worker in 0..workers {
            fleets.set_ready(WorkerId(worker), true);
        }
        let journal = Journal::default();
        let router = |fleet: &Arc<slipstream_router::Fleet>| Router::new(fleet.clone(), 0);
        let dispatcher = Dispatcher::new(
            Rules::of_cluster(cluster),
            router(&fleets.serve),
            fleets.prefill.as_ref().map(router),
        )
        .with_journal(journal.clone());
        let kv_network = fleets
            .prefill
            .is_some()
            .then(|| Arc::new(KvNetwork::new(cluster, 1)));
        let shard = plane.shards.into_iter().next().unwrap();
        let planes = vec![ShardPlane {
            transport: WorkerTransport::Rings(shard),
            dispatcher,
            kv_network,
        }];
        let bound = Bound::bind("127.0.0.1:0").unwrap();
        let service = service(cluster, fleets.clone());
        let registry = slipstream_metrics::Registry::default();
        let mut frontend = Frontend::start(bound, service, planes, registry).unwrap();
        frontend.open().unwrap();
        Live {
            frontend,
            workers: plane.threads.into_iter().map(Some).collect(),
            fleets,
            journal,
            names: Names::default(),
            seen: 0,
            clients: Vec::new(),
            placed: BTreeMap::new(),
            sent: BTreeMap::new(),
            answered: BTreeMap::new(),
        }
    }

    /// The worker crashes, after it has sent its clients as many tokens as in the twin.
    fn crash(&mut self, worker: WorkerId, resumed: &[(usize, u32)]) {
        let port = self.workers[worker.index()].as_mut().expect("it lives");
        for &(request, answered) in resumed {
            let Some(sent) = self.sent.insert(request, answered) else {
                panic!("request {request} had no token");
            };
            self.answered.insert(request, answered);
            let placed = self.placed[&(request, false)];
            if placed.worker != worker {
                continue; // the worker of its prompt is lost, while another one is to continue it
            }
            let tokens = vec![300; (answered - sent) as usize];
            if !tokens.is_empty() {
                let frame = port.frame(0).expect("the shard lives");
                frame.push_tokens(placed.addr.stream, &tokens, None);
            }
        }
        assert_ne!(port.flush(0, false), Flushed::Full);
        self.workers[worker.index()] = None;
    }

    /// What the fault changes in the fleet: its begin is the first change, its end the second.
    fn change_fleet(&mut self, fault: Fault, changes: u32) {
        match (fault, changes) {
            (Fault::Drain { worker, .. }, 1) => self.fleets.set_ready(WorkerId(worker), false),
            (Fault::Drain { worker, .. }, _) => self.fleets.set_ready(WorkerId(worker), true),
            // A worker that lost a GPU stands still first.
            (Fault::Crash(worker), 1) | (Fault::Gpu(worker), 2) => {
                // It had nothing.
                self.workers[worker as usize] = None;
                self.fleets.on_worker_lost(WorkerId(worker));
            }
            // They change only when inputs come.
            (
                Fault::None | Fault::Crash(_) | Fault::Gpu(_) | Fault::Slow(_) | Fault::Link { .. },
                _,
            ) => {}
        }
    }

    fn submit(&mut self, prompt_tokens: u32, max_tokens: u32) {
        let n = self.clients.len() as u32;
        let tokens: Vec<String> = (0..prompt_tokens)
            .map(|at| (300 + (n * 131 + at * 7) % 900).to_string())
            .collect();
        let body = format!(
            "{{\"model\":\"test-model\",\"prompt\":[{}],\"max_tokens\":{max_tokens},\"stream\":true}}",
            tokens.join(",")
        );
        let mut client = TcpStream::connect(self.frontend.address()).unwrap();
        write!(
            client,
            "POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        self.clients.push(client);
    }

    fn send(&mut self, entries: &[(usize, Input)]) {
        let prefill = |input: &Input| *input == Input::Prefilled;
        let (request, input) = &entries[0];
        let worker = self.placed[&(*request, prefill(input))].worker;
        let port = self.workers[worker.index()].as_mut().expect("it lives");
        let frame = port.frame(0).expect("the shard lives");
        for (request, input) in entries {
            let placed = self.placed[&(*request, prefill(input))];
            assert_eq!(placed.worker, worker, "one worker per frame");
            if *input == Input::FirstToken {
                *self.sent.entry(*request).or_default() += 1;
            }
            push(frame, placed, *input);
        }
        assert_eq!(port.flush(0, false), Flushed::Sent);
    }

    /// The new lines of the journal, once there are as many as `count`, and the actions among them.
    fn lines(&mut self, count: usize) -> (Vec<String>, Vec<(usize, Action)>) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let lines: Vec<Line> = self.journal.lines();
            let ours = lines.iter().filter(|line| **line != Line::FleetChanged);
            if ours.clone().count() >= self.seen + count || Instant::now() > deadline {
                let (mut texts, mut actions) = (Vec::new(), Vec::new());
                for line in ours.skip(self.seen) {
                    let (request, text) = self.names.name(line);
                    texts.push(text);
                    if let Line::Action(action) = line {
                        actions.push((request, *action));
                    }
                }
                self.seen += texts.len();
                return (texts, actions);
            }
            std::thread::yield_now();
        }
    }

    /// Takes the message with which the frontend carries `action` out.
    fn expect_message(&mut self, request: usize, action: &Action) {
        let rank = match action {
            Action::Start { rank, .. }
            | Action::Receive { rank, .. }
            | Action::Release { rank, .. } => *rank,
            _ => return,
        };
        let Some(port) = &mut self.workers[rank.worker.index()] else {
            return; // it has crashed since
        };
        let deadline = Instant::now() + PATIENCE;
        let message = loop {
            match port.receive() {
                // Of a part that the worker may not have got.
                Some(ToWorker::Kill { .. }) => {}
                Some(message) => break message,
                None => {
                    assert!(
                        Instant::now() < deadline,
                        "{request}: {action:?} was not sent"
                    );
                    std::thread::yield_now();
                }
            }
        };
        assert_eq!(message.rank(), rank);
        match (action, message) {
            (Action::Start { role, .. }, ToWorker::Start(start)) => {
                assert_eq!(start.role, *role, "request {request}");
                let answered = self.answered.get(&request).copied().unwrap_or_default();
                assert_eq!(start.request.params.answered, answered);
                let placed = Placed {
                    worker: rank.worker,
                    addr: start.addr,
                    role: start.role,
                    attempt: start.attempt,
                };
                self.placed
                    .insert((request, *role == Role::Prefill), placed);
            }
            (Action::Receive { .. }, ToWorker::Receive { addr, .. }) => {
                assert_eq!(addr, self.placed[&(request, false)].addr);
            }
            (Action::Release { .. }, ToWorker::Release { addr, .. }) => {
                assert_eq!(addr, self.placed[&(request, true)].addr);
            }
            (action, message) => panic!("{message:?} carries no {action:?} out"),
        }
    }
}

fn push(frame: &mut PassFrame, placed: Placed, input: Input) {
    let stream = placed.addr.stream;
    let pass = FirstPass {
        start_ns: 1,
        end_ns: 2,
    };
    match input {
        Input::Prefilled => {
            frame.push_prologue(stream, &Prologue::default());
            frame.push_computed(stream, pass);
        }
        Input::Reserved { cached_tokens } => {
            assert_eq!(
                placed.role,
                Role::Decode,
                "only an answer's worker makes room"
            );
            let reserved = Reserved {
                attempt: placed.attempt,
                cached_tokens,
                ..Reserved::default()
            };
            frame.push_reserved(stream, &reserved);
        }
        Input::FirstToken => {
            frame.push_prologue(stream, &Prologue::default());
            frame.push_tokens(stream, &[300], Some(pass));
        }
        Input::Ended => {
            let end = End {
                reason: FinishReason::Length,
                usage: Usage::default(),
            };
            frame.push_end(stream, &end);
        }
        other => panic!("no entry says {other:?}"),
    }
}

/// Made once: it takes a while.
fn text() -> Arc<TextModel> {
    static TEXT: OnceLock<Arc<TextModel>> = OnceLock::new();
    TEXT.get_or_init(|| Arc::new(TextModel::builtin())).clone()
}

fn service(cluster: &Cluster, fleets: Fleets) -> Service {
    let second = Duration::from_secs(1);
    Service {
        max_model_len: 1024,
        kv_blocks: 128,
        limits: Limits {
            read_timeout: 60 * second,
            streams_max: 1024,
            client_streams_max: 1024,
            drain: second / 100,
            ..Limits::default()
        },
        ..Service::new(&cluster.model.name, text(), fleets)
    }
}

/// Replays the twin's lines. Returns how many there were.
fn check(case: &Case) -> usize {
    let cluster = cluster(&case.cluster);
    let lines = twin_lines(&cluster, &case.workload);
    let mut live = Live::start(&cluster);
    let mut changes = 0;
    for (at, step) in steps(&lines).iter().enumerate() {
        match &step.stimulus {
            Stimulus::Submit {
                prompt_tokens,
                max_tokens,
            } => live.submit(*prompt_tokens, *max_tokens),
            Stimulus::Entries(entries) => live.send(entries),
            Stimulus::Crash(worker) => {
                changes += 1;
                live.crash(*worker, &step.resumed);
            }
            Stimulus::FleetChanged => {
                changes += 1;
                live.change_fleet(case.fault, changes);
            }
        }
        let (mut found, actions) = live.lines(step.expected.len());
        if matches!(step.stimulus, Stimulus::Crash(_)) {
            sort_by_request(&mut found);
        }
        assert_eq!(
            found, step.expected,
            "{}, step {at} ({:?}): the frontend's dispatcher beside the twin's",
            case.name, step.stimulus
        );
        // In the order of this driver, which is another one after a crash.
        for (request, action) in &actions {
            live.expect_message(*request, action);
        }
    }
    let (left, _) = live.lines(0);
    assert!(
        left.is_empty(),
        "{}: more than in the twin: {left:?}",
        case.name
    );
    let count = live.seen;
    drop(live.clients);
    drop(live.workers);
    live.frontend.shutdown();
    count
}

/// Why one of the drivers never has a fault; `None`: both do.
fn fault_one_sided(fault: &cluster::Fault) -> Option<&'static str> {
    match fault {
        cluster::Fault::Crash
        | cluster::Fault::Drain
        | cluster::Fault::Slow { .. }
        | cluster::Fault::Link { .. }
        | cluster::Fault::Gpu { .. } => None,
        cluster::Fault::Uplink { .. } => Some("a frontend cannot cut a link between switches"),
        cluster::Fault::KvLoss { .. } | cluster::Fault::KvLate { .. } => Some(
            "the workers of this test publish no KV events; live ones are lost in `crates/rig/vopr`",
        ),
        cluster::Fault::Frontend => Some(
            "a frontend that stops takes its journal with it; live ones are killed in `crates/rig/vopr`",
        ),
        cluster::Fault::Partition { .. } => Some(
            "engine threads have no connection; live ones are cut, half-open and stalled in `crates/rig/vopr`",
        ),
        cluster::Fault::Upgrade { .. } => Some(
            "an engine thread that has ended does not return; processes do in `tests/it/survive.rs`",
        ),
    }
}

/// Every fault of a cluster file under both drivers. One form exists in one driver alone: a crashed worker
/// returns in the twin and as a process of its own (`crates/rig/vopr`, `tests/it/survive.rs`), but an engine thread
/// that has ended does not, and these are engine threads.
#[test]
fn every_fault_gives_the_same_actions_under_both_drivers() {
    // Complete: a new kind of fault needs a row.
    let row = |of: &cluster::Fault| {
        assert_eq!(fault_one_sided(of), None);
        std::mem::discriminant(of)
    };
    let mut rows = std::collections::HashSet::new();
    let mut delayed = false;
    for (fault, queue) in [
        (Fault::Crash(1), false),
        (Fault::Gpu(1), false),
        (drain(0, false), false),
        (drain(3, false), false),
        (drain(1, true), false),
        (drain(2, true), false),
        (drain(0, true), true),
        (Fault::Slow(0), false),
        (Fault::Slow(3), false),
        (
            Fault::Link {
                worker: 2,
                share: 0.1,
            },
            false,
        ),
        (
            Fault::Link {
                worker: 1,
                share: 0.0,
            },
            false,
        ),
    ] {
        for (order, policy) in [("pull", "least_requests"), ("push", "round_robin")] {
            // A slow link delays transfers in the twin alone, as no frontend can slow a link down: ranks would
            // be charged for longer there. Decisions must not depend on charges.
            let network = matches!(fault, Fault::Link { .. });
            let policy = if network { "round_robin" } else { policy };
            let case = case_of(fault, order, policy, queue, network);
            let faulty = cluster(&case.cluster);
            rows.extend(faulty.events.iter().map(|event| row(&event.fault)));
            let lines = twin_lines(&faulty, &case.workload);
            let same = case_of(Fault::None, order, policy, queue, network);
            let undisturbed = twin_lines(&cluster(&same.cluster), &same.workload);
            assert_ne!(
                lines, undisturbed,
                "{}: the fault changes nothing",
                case.name
            );
            delayed |= queue && has_queued(&lines);
            assert!(check(&case) > 32, "{}: something happened", case.name);
        }
    }
    assert_eq!(rows.len(), 5, "every kind of fault has a row");
    assert!(delayed, "requests waited until the worker returned");
}

fn drain(worker: u32, returns: bool) -> Fault {
    Fault::Drain { worker, returns }
}

/// Whether a request started later than its submission.
fn has_queued(lines: &[Line]) -> bool {
    lines.windows(2).any(|pair| {
        let submitted = matches!(
            pair[0],
            Line::Input {
                input: Input::Submitted { .. },
                ..
            }
        );
        submitted && !matches!(pair[1], Line::Action(_))
    })
}

/// Why one of the drivers never gives an input; `None`: both do.
fn one_sided(input: &Input) -> Option<&'static str> {
    match input {
        Input::Submitted { .. }
        | Input::Prefilled
        | Input::Reserved { .. }
        | Input::Transferred
        | Input::FirstToken
        | Input::Resumed { .. }
        | Input::Ended
        | Input::Failed { .. } => None,
        Input::PrefillFailed => Some(
            "live alone, at engines over HTTP: a modelled engine that lives computes its prompts \
             (`a_prefill_engine_that_fails_costs_no_answer`)",
        ),
        Input::Refused { .. } => Some(
            "a request that fits no engine: the twin's arrives there, a live one is answered 400 before it \
             is submitted (`what_does_not_fit_into_the_model_is_refused_as_by_the_server`)",
        ),
        Input::Canceled => Some("live alone: modelled clients wait for their answers"),
    }
}

#[test]
fn both_drivers_take_the_same_actions() {
    let mut kinds = std::collections::BTreeSet::new();
    for n in 0..40 {
        let case = case(n);
        let cluster = cluster(&case.cluster);
        for line in twin_lines(&cluster, &case.workload) {
            let kind = match line {
                Line::Input { input, .. } => {
                    assert_eq!(one_sided(&input), None, "{}: {input:?}", case.name);
                    format!("{input:?}")
                }
                Line::Action(action) => format!("{action:?}"),
                Line::FleetChanged => "FleetChanged".into(),
            };
            let end = kind.find([' ', '{']).unwrap_or(kind.len());
            kinds.insert(kind[..end].to_owned());
        }
        assert!(check(&case) > 32, "{}: something happened", case.name);
    }
    // The scripts reach what they are for.
    for kind in [
        "Prefilled",
        "Reserved",
        "Transferred",
        "FirstToken",
        "Ended",
        "Failed",
        "Resumed",
        "Start",
        "Kill",
        "Transfer",
        "Receive",
        "Release",
        "Lost",
        "Rejected",
    ] {
        assert!(kinds.contains(kind), "no script has {kind}: {kinds:?}");
    }
}
