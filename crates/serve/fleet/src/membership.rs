//! Engines of a pool that something else lists: addresses of a name, or Kubernetes.
//!
//! A source yields whole lists, and a thread applies them: engines that are new join, and those that are gone drain.
//! A source that fails changes nothing.

use std::collections::BTreeSet;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use slipstream_base::width::to_u32;
use slipstream_config::cluster::{Cluster, EngineUrl};
use slipstream_frontend::upstream::{Engines, MemberError};
use tokio::sync::watch;
use tokio::task::LocalSet;

use super::endpoint_slices::EndpointSlices;

/// Time limit of a look-up.
const LOOKUP: Duration = Duration::from_secs(5);

/// Time for look-ups at the start of the server, together.
const AT_START: Duration = Duration::from_secs(3);

/// Interval at which engines that did not get a slot are tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Engines of one source at most.
const MEMBERS_MAX: usize = 4096;

/// A list of engines, or why there is none now.
pub type Listing<'s> = Pin<Box<dyn Future<Output = Result<BTreeSet<String>, String>> + 's>>;

/// A source of the engines of a pool, by their addresses as [`EngineUrl`] writes them.
pub trait MemberSource {
    /// Name for messages.
    fn name(&self) -> String;

    /// The next list. It waits as long as a list is unlikely to have changed, and after a failure.
    fn next(&mut self) -> Listing<'_>;
}

/// All addresses of a name. The system's resolver does not report their time to live, so it is asked at an interval.
struct DnsName {
    url: EngineUrl,
    interval: Duration,
    /// It has been asked before.
    asked: bool,
}

impl MemberSource for DnsName {
    fn name(&self) -> String {
        self.url.to_string()
    }

    fn next(&mut self) -> Listing<'_> {
        Box::pin(async move {
            if std::mem::replace(&mut self.asked, true) {
                tokio::time::sleep(self.interval).await;
            }
            addresses(&self.url).await
        })
    }
}

/// The engines at the addresses of the name in `url`.
async fn addresses(url: &EngineUrl) -> Result<BTreeSet<String>, String> {
    let lookup = tokio::net::lookup_host((&*url.host, url.port));
    let found = match tokio::time::timeout(LOOKUP, lookup).await {
        Ok(found) => found.map_err(|error| error.to_string())?,
        Err(_) => return Err(format!("no answer within {LOOKUP:?}")),
    };
    let of = |ip: IpAddr| EngineUrl {
        host: ip.to_string(),
        ..url.clone()
    };
    Ok(found.map(|address| of(address.ip()).to_string()).collect())
}

/// `cluster` with the engines that its names have now. A name that cannot be looked up has none yet, which is
/// a `note`.
///
/// # Errors
/// No runtime can be made.
pub fn resolved(cluster: &Cluster, note: impl Fn(&str)) -> anyhow::Result<Cluster> {
    let mut cluster = cluster.clone();
    let names = |cluster: &Cluster| -> Vec<(usize, EngineUrl)> {
        let pools = cluster.pools.iter().enumerate();
        pools
            .flat_map(|(at, pool)| {
                let dns = pool.engines.iter().flat_map(|engines| &engines.dns);
                dns.map(move |url| (at, url.clone()))
            })
            .collect()
    };
    let names = names(&cluster);
    if names.is_empty() {
        return Ok(cluster);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut taken: BTreeSet<String> = cluster
        .pools
        .iter()
        .flat_map(|pool| pool.engines.iter().flat_map(|engines| &engines.urls))
        .map(ToString::to_string)
        .collect();
    let found = runtime.block_on(async {
        let all = async {
            let mut found = Vec::new();
            for (at, url) in &names {
                found.push((*at, url, addresses(url).await));
            }
            found
        };
        tokio::time::timeout(AT_START, all)
            .await
            .unwrap_or_default()
    });
    // A look-up that hangs does not hold the start up.
    runtime.shutdown_background();
    for (at, name, engines) in found {
        let pool = &mut cluster.pools[at];
        let Some(of) = &mut pool.engines else {
            continue;
        };
        match engines {
            Ok(engines) => {
                let new = engines.into_iter().filter(|url| taken.insert(url.clone()));
                of.urls
                    .extend(new.filter_map(|url| EngineUrl::parse(&url).ok()));
            }
            Err(why) => note(&format!("no engines of {name} yet: {why}")),
        }
        pool.workers = (to_u32(of.urls.len())).max(1);
    }
    Ok(cluster)
}

/// A source of any kind.
enum Source {
    Dns(DnsName),
    Slices(Box<EndpointSlices>),
}

/// Follows sources until it is dropped.
pub struct Membership {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        let _ = self.stop.send(true); // an error: the thread has ended
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that follows the engines' names ended by panic");
        }
    }
}

/// Follows the names of `given`, the cluster file. The engines of `now` are in the fleet already.
///
/// # Errors
/// The thread or its runtime cannot be made.
pub fn start(
    given: &Cluster,
    now: &Cluster,
    engines: &Arc<Engines>,
) -> anyhow::Result<Option<Membership>> {
    let mut followers = of_names(given, now);
    followers.extend(of_slices(given)?);
    if followers.is_empty() {
        return Ok(None);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (stop, mut stopped) = watch::channel(false);
    let engines = engines.clone();
    let run = move || {
        let tasks = LocalSet::new();
        for (source, follower) in followers {
            let engines = engines.clone();
            match source {
                Source::Dns(source) => tasks.spawn_local(follow(source, follower, engines)),
                Source::Slices(source) => tasks.spawn_local(follow(*source, follower, engines)),
            };
        }
        runtime.block_on(tasks.run_until(async move {
            let _ = stopped.changed().await;
        }));
        drop(tasks);
        runtime.shutdown_background(); // a look-up may hang
    };
    let thread = std::thread::Builder::new()
        .name("membership".into())
        .spawn(run)
        .context("following the engines' names")?;
    Ok(Some(Membership {
        stop,
        thread: Some(thread),
    }))
}

/// A follower for each name of the file. The engines that a name has at the start are those of `now`.
fn of_names(given: &Cluster, now: &Cluster) -> Vec<(Source, Follower)> {
    let interval = Duration::from_secs_f64(given.upstream.dns_interval_s);
    let mut followers: Vec<(Source, Follower)> = Vec::new();
    for (pool, with) in given.pools.iter().zip(&now.pools) {
        let (Some(of), Some(with)) = (&pool.engines, &with.engines) else {
            continue;
        };
        let own: BTreeSet<String> = of.urls.iter().map(ToString::to_string).collect();
        let listed = with.urls.iter().map(ToString::to_string);
        let listed: BTreeSet<String> = listed.filter(|url| !own.contains(url)).collect();
        for url in &of.dns {
            // An engine of two names stays while one of them has it.
            let of_name = |listed: &String| {
                EngineUrl::parse(listed).is_ok_and(|of| {
                    (of.tls, of.port, &of.prefix) == (url.tls, url.port, &url.prefix)
                })
            };
            followers.push((
                Source::Dns(DnsName {
                    url: url.clone(),
                    interval,
                    asked: false,
                }),
                Follower {
                    pool: pool.name.clone(),
                    listed: listed.iter().filter(|url| of_name(url)).cloned().collect(),
                    own: own.clone(),
                    failing: false,
                    refused: false,
                },
            ));
        }
    }
    followers
}

/// A follower for each pool whose engines Kubernetes lists.
fn of_slices(given: &Cluster) -> anyhow::Result<Vec<(Source, Follower)>> {
    let mut followers = Vec::new();
    for pool in &given.pools {
        let Some(of) = &pool.engines else {
            continue;
        };
        if let Some(selector) = &of.endpoint_slices {
            let config = &given.upstream.kubernetes;
            let source = EndpointSlices::new(config, selector, of.endpoint_port.as_deref());
            let source = source.with_context(|| format!("[pool.{}]", pool.name))?;
            followers.push((
                Source::Slices(Box::new(source)),
                Follower {
                    pool: pool.name.clone(),
                    listed: BTreeSet::new(),
                    own: of.urls.iter().map(ToString::to_string).collect(),
                    failing: false,
                    refused: false,
                },
            ));
        }
    }
    Ok(followers)
}

async fn follow(mut source: impl MemberSource, mut follower: Follower, engines: Arc<Engines>) {
    let name = source.name();
    let mut last = None;
    loop {
        let mut next = source.next();
        let list = loop {
            tokio::select! {
                list = &mut next => break list,
                // A slot may be free by now, and the list may never change again.
                () = tokio::time::sleep(RETRY), if follower.refused => {
                    if let Some(last) = last.clone() {
                        follower.apply(&name, Ok(last), &*engines);
                    }
                }
            }
        };
        last = list.as_ref().ok().cloned().or(last);
        follower.apply(&name, list, &*engines);
    }
}

/// A fleet that engines join and leave.
trait Members {
    fn join(&self, url: &EngineUrl, pool: &str) -> Result<(), MemberError>;
    fn leave(&self, url: &EngineUrl);
}

impl Members for Engines {
    fn join(&self, url: &EngineUrl, pool: &str) -> Result<(), MemberError> {
        match self.add(url, Some(pool), None, None) {
            Ok(_) | Err(MemberError::Listed { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn leave(&self, url: &EngineUrl) {
        let _ = self.drain(url, None); // the admin API may have removed it
    }
}

/// The engines of one source.
struct Follower {
    pool: String,
    /// As of the last list, without those that did not join.
    listed: BTreeSet<String>,
    /// Engines that the cluster file lists by address: they do not leave.
    own: BTreeSet<String>,
    failing: bool,
    /// Some of the last list did not join.
    refused: bool,
}

impl Follower {
    /// Applies a list. An empty one, or none, changes nothing: engines that are gone fail their health checks, and a
    /// fault of the source must not remove those that are well.
    fn apply(
        &mut self,
        source: &str,
        list: Result<BTreeSet<String>, String>,
        members: &dyn Members,
    ) {
        let list = match list {
            Ok(list) if list.is_empty() => Err("it lists no engine".into()),
            Ok(list) if list.len() > MEMBERS_MAX => Err(format!(
                "it lists {} engines, more than {MEMBERS_MAX}",
                list.len()
            )),
            list => list,
        };
        let list = match list {
            Ok(list) => list,
            Err(why) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(source, "the engines stay as they are: {why}");
                }
                return;
            }
        };
        if std::mem::take(&mut self.failing) {
            tracing::info!(source, "the engines are followed again");
        }
        let urls = |of: &BTreeSet<String>, others: &BTreeSet<String>| -> Vec<EngineUrl> {
            let different = of.difference(others);
            different
                .filter_map(|url| EngineUrl::parse(url).ok())
                .collect()
        };
        // First those that leave: their slots may be needed, once they have drained.
        for url in urls(&self.listed, &list) {
            if !self.own.contains(&url.to_string()) {
                members.leave(&url);
            }
        }
        let mut listed = list.clone();
        let mut refused = None;
        for url in urls(&list, &self.listed) {
            if let Err(error) = members.join(&url, &self.pool) {
                listed.remove(&url.to_string()); // tried again with the next list
                refused.get_or_insert((url, error));
            }
        }
        match refused {
            Some((url, error)) if !std::mem::replace(&mut self.refused, true) => {
                let missing = list.len() - listed.len();
                tracing::warn!(engine = %url, source, missing, "engines are not added: {error}");
            }
            refused => self.refused = refused.is_some(),
        }
        self.listed = listed;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[derive(Default)]
    struct Log {
        seen: RefCell<Vec<String>>,
        full: bool,
    }

    impl Members for Log {
        fn join(&self, url: &EngineUrl, pool: &str) -> Result<(), MemberError> {
            if self.full {
                return Err(MemberError::Full { slots: 1 });
            }
            self.seen.borrow_mut().push(format!("+{url} {pool}"));
            Ok(())
        }

        fn leave(&self, url: &EngineUrl) {
            self.seen.borrow_mut().push(format!("-{url}"));
        }
    }

    fn list(hosts: &[&str]) -> BTreeSet<String> {
        let urls = hosts.iter().map(|host| format!("http://{host}:80"));
        urls.collect()
    }

    fn follower(listed: &[&str], own: &[&str]) -> Follower {
        Follower {
            pool: "p".into(),
            listed: list(listed),
            own: list(own),
            failing: false,
            refused: false,
        }
    }

    #[test]
    fn engines_join_and_leave_as_the_list_changes_and_faults_change_nothing() {
        let log = Log::default();
        let mut follower = follower(&["a", "b"], &[]);
        let mut apply = |list: Result<_, String>, expected: &[&str]| {
            follower.apply("s", list, &log);
            assert_eq!(log.seen.take(), expected);
        };
        apply(Ok(list(&["a", "b"])), &[]);
        apply(Ok(list(&["b", "c"])), &["-http://a:80", "+http://c:80 p"]);
        apply(Err("no name server".into()), &[]);
        apply(Ok(list(&[])), &[]);
        let many: Vec<String> = (0..=MEMBERS_MAX).map(|n| format!("h{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        apply(Ok(list(&many)), &[]);
        apply(Ok(list(&["b"])), &["-http://c:80"]);
        apply(Ok(list(&["a", "b"])), &["+http://a:80 p"]);
    }

    #[test]
    fn an_engine_without_a_slot_is_tried_again_and_one_of_the_file_stays() {
        let mut log = Log {
            full: true,
            ..Log::default()
        };
        let mut follower = follower(&["a"], &["a"]);
        follower.apply("s", Ok(list(&["a", "b"])), &log);
        assert_eq!(log.seen.take(), [""; 0]);
        log.full = false;
        follower.apply("s", Ok(list(&["b"])), &log);
        assert_eq!(log.seen.take(), ["+http://b:80 p"]);
    }

    #[test]
    fn all_addresses_of_a_name_are_engines() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.unwrap();
        let url = EngineUrl::parse("http://localhost:8000/v").unwrap();
        let found = runtime.block_on(addresses(&url)).unwrap();
        let known = ["http://127.0.0.1:8000/v", "http://[::1]:8000/v"];
        assert!(
            !found.is_empty() && found.iter().all(|url| known.contains(&url.as_str())),
            "{found:?}"
        );
        // A label has 63 characters at most, so no name server is asked.
        let url = EngineUrl::parse(&format!("http://{}:8000", "x".repeat(64))).unwrap();
        assert!(runtime.block_on(addresses(&url)).is_err());
    }
}
