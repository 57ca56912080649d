use slipstream_planes::discovery::SeatKey;
use slipstream_planes::link::Link;
use slipstream_planes::ring::{Plane, PlaneLimits};
use slipstream_planes::wire::{Hello, Welcome};
use tokio::net::TcpListener;
use tokio::time::timeout;

use super::*;

/// Time limit, longer than any operation here; a test that reaches it fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process of one worker, without a thread that runs its engine.
fn home(links: Vec<ShardPort>) -> Rc<Home> {
    let config = CallHomeConfig {
        instance: 1,
        fingerprint: 7,
        name: "worker".into(),
        discovery: Place::Folder("none".into()),
        lease: PATIENCE,
        deadline: PATIENCE,
        unsent_bytes_max: 1 << 20,
        tls: None,
    };
    let (broadcast, stats) = (EventBroadcast::default(), Arc::default());
    let worker = WorkerRanks {
        worker: WorkerId(0),
        ranks: vec![Arc::default()],
    };
    let mut home = Home::new(
        config,
        links,
        vec![worker],
        Resyncs::default(),
        broadcast,
        stats,
    );
    // No engine thread would confirm that a connection has ended.
    let alone = Rc::get_mut(&mut home).expect("nobody else has it yet");
    alone.thread_workers.clear();
    home
}

fn frontend(instance: u64, listener: &TcpListener) -> ProcessRecord {
    ProcessRecord {
        role: ProcessRole::Frontend,
        instance,
        name: format!("frontend-{instance}"),
        fingerprint: 7,
        shards: vec![listener.local_addr().unwrap().to_string()],
        workers: Vec::new(),
        key: Some(SeatKey::draw().unwrap()),
    }
}

/// Accepts the next connection, which has to be for `frontend`, and welcomes it.
#[track_caller]
fn welcome<'a>(
    listener: &'a TcpListener,
    frontend: &'a ProcessRecord,
) -> impl Future<Output = Link> + use<'a> {
    let greeting = async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut link = Link::new(Box::new(stream), PATIENCE, 1 << 20);
        let hello = link.receive(|_, body| Hello::decode(body)).await.unwrap();
        let key = frontend.key.as_ref().unwrap().bytes();
        assert_eq!(hello.key, key, "a dial of another one");
        let welcome = Welcome {
            instance: frontend.instance,
            shard: hello.shard,
            wants_kv: false,
            deadline_ms: PATIENCE.as_millis() as u32,
            name: frontend.name.clone(),
        };
        welcome.encode(link.outbox());
        link.flush().await.unwrap();
        link
    };
    async { timeout(PATIENCE, greeting).await.expect("a connection") }
}

#[test]
fn a_record_that_comes_back_finds_its_connection() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    LocalSet::new().block_on(&runtime, async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let plane = Plane::new(4, 1, PlaneLimits::default());
        let home = home(plane.shards);
        let (_stage, staged) = watch::channel(Stage::Running);
        let mut frontends = Frontends::new(&home, &staged);
        let (one, two) = (frontend(1, &listener), frontend(2, &listener));
        frontends.on_event(SessionEvent::Appeared(one.clone()));
        let first = welcome(&listener, &one).await;

        // Dials are made in turn: a second one to the first would come before this.
        frontends.on_event(SessionEvent::Vanished(one.clone()));
        frontends.on_event(SessionEvent::Appeared(one.clone()));
        frontends.on_event(SessionEvent::Appeared(two.clone()));
        let _second = welcome(&listener, &two).await;

        // It is wanted again: a connection that is lost is made anew.
        drop(first);
        let first = welcome(&listener, &one).await;

        // One that is gone is not dialed; one that comes back after that is, once.
        frontends.on_event(SessionEvent::Vanished(one.clone()));
        drop(first);
        let ended = timeout(PATIENCE, frontends.tasks.join_next()).await;
        ended.expect("the dialer ends").unwrap().unwrap();
        for _ in 0..2 {
            frontends.on_event(SessionEvent::Appeared(one.clone()));
        }
        let _first = welcome(&listener, &one).await;
        assert_eq!(frontends.tasks.len(), 2, "a dialer for each");
        let stats = &home.stats;
        let refused = (stats.rejected.load(Relaxed), stats.failed.load(Relaxed));
        assert_eq!((stats.lost.load(Relaxed), refused), (2, (0, 0)));
    });
}

/// Thousands of false records, whose addresses refuse connections, accept without a word, or answer with
/// something else, keep no frontend from this process.
#[test]
fn false_records_keep_no_frontend_away() {
    const FALSE_RECORDS: u64 = 2_000;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    LocalSet::new().block_on(&runtime, async {
        let bind = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = |of: &TcpListener| of.local_addr().unwrap().to_string();
        // The listener is gone.
        let refusing = address(&bind().await);
        let silent = bind().await;
        let silent_address = address(&silent);
        let listener = bind().await;
        let plane = Plane::new(4, 4, PlaneLimits::default());
        let links = plane.shards.len();
        let home = home(plane.shards);
        let (_stage, staged) = watch::channel(Stage::Running);
        let mut frontends = Frontends::new(&home, &staged);
        for n in 0..FALSE_RECORDS {
            let to = if n < links as u64 / 2 {
                &silent_address
            } else {
                &refusing
            };
            let mut record = frontend(10 + n, &listener);
            record.shards = vec![to.clone(); 200];
            frontends.on_event(SessionEvent::Appeared(record));
        }
        assert_eq!(
            frontends.tasks.len() as u64,
            FALSE_RECORDS,
            "a dialer for each"
        );
        // A frontend of three shards, of which the first does not answer.
        let mut real = frontend(1, &listener);
        let true_address = address(&listener);
        real.shards = vec![refusing.clone(), true_address.clone(), true_address];
        frontends.on_event(SessionEvent::Appeared(real.clone()));
        let first = welcome(&listener, &real).await;
        let (instance, shard) = frontends.proven.recv().await.unwrap();
        assert_eq!((instance, shard), (1, 1));
        frontends.on_proven(instance, shard);
        let second = welcome(&listener, &real).await;
        assert_eq!(frontends.dialers.len(), 3);
        assert_eq!(home.stats.links_short.load(Relaxed), 0);
        drop((first, second, silent));
    });
}
