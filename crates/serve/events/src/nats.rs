//! The NATS bus, and a subscription.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::client::PublishErrorKind;
use async_nats::{ConnectOptions, HeaderMap, HeaderName, Subject};
use futures_util::StreamExt;

use crate::batch::{Batch, EventKind, RankTopics};
use crate::bus::{Bus, BusCounters, Event, NatsError, add};

/// Header for the sequence of a KV batch: ZeroMQ's second frame.
pub const SEQUENCE_HEADER: &str = "Sequence";

/// Events that the client buffers while the server is unavailable; the rest waits in queues that
/// drop.
const CLIENT_EVENTS: usize = 1024;

/// Longest pause between two connection attempts.
const RECONNECT_MAX: Duration = Duration::from_secs(2);

/// Subjects of one rank.
struct RankSubjects {
    fpm: Subject,
    kv: Subject,
}

impl RankSubjects {
    fn new(topics: &RankTopics) -> Result<RankSubjects, async_nats::SubjectError> {
        Ok(RankSubjects {
            fpm: Subject::validated(&topics.fpm.subject)?,
            kv: Subject::validated(&topics.kv.subject)?,
        })
    }
}

/// The bus.
pub(crate) struct NatsBus {
    client: async_nats::Client,
    subjects: Vec<RankSubjects>,
    /// Benchmark mode: format and parse the subject for each event.
    fresh_subjects: bool,
    header: HeaderName,
    counters: Arc<BusCounters>,
}

impl NatsBus {
    /// Connects, now or when the server becomes available. Must be called on a runtime.
    pub(crate) async fn start(
        url: &str,
        topics: &[RankTopics],
        fresh_subjects: bool,
        counters: &Arc<BusCounters>,
    ) -> Result<NatsBus, NatsError> {
        let fail = |source: Box<dyn std::error::Error + Send + Sync>| NatsError {
            url: url.to_owned(),
            source,
        };
        let subjects = topics.iter().map(RankSubjects::new);
        let subjects = subjects
            .collect::<Result<_, _>>()
            .map_err(|e| fail(e.into()))?;
        let state = Arc::clone(counters);
        let client = ConnectOptions::new()
            .name("slipstream")
            .retry_on_initial_connect()
            // Done once, when topics are created.
            .skip_subject_validation(!fresh_subjects)
            .client_capacity(CLIENT_EVENTS)
            .reconnect_delay_callback(|attempts| {
                let doubled = Duration::from_millis(10 << attempts.min(10));
                doubled.min(RECONNECT_MAX)
            })
            .event_callback(move |event| {
                let state = Arc::clone(&state);
                async move { note_event(&state, &event) }
            })
            .connect(url)
            .await
            .map_err(|error| fail(error.into()))?;
        Ok(NatsBus {
            client,
            subjects,
            fresh_subjects,
            header: HeaderName::from_static(SEQUENCE_HEADER),
            counters: Arc::clone(counters),
        })
    }

    async fn publish(&self, batch: &Batch) {
        // If the caller drops this while the server is unavailable, the rest is counted.
        let mut left = Left {
            events: batch.records.len() as u64,
            counters: &self.counters,
        };
        for record in &batch.records {
            let subjects = &self.subjects[record.rank as usize];
            let subject = match batch.kind {
                EventKind::Fpm => &subjects.fpm,
                EventKind::Kv => &subjects.kv,
            };
            let subject = if self.fresh_subjects {
                let text: String = subject.as_str().to_owned();
                Subject::validated(text).expect("it was valid before")
            } else {
                subject.clone()
            };
            let payload = batch.payload(record);
            let published = match batch.kind {
                EventKind::Fpm => self.client.publish(subject, payload).await,
                EventKind::Kv => {
                    let mut headers = HeaderMap::new();
                    headers.insert(self.header.clone(), record.sequence.to_string());
                    let publish = self.client.publish_with_headers(subject, headers, payload);
                    publish.await
                }
            };
            match published {
                Ok(()) => left.events -= 1,
                Err(error) if error.kind() == PublishErrorKind::MaxPayloadExceeded => {
                    if self.counters.refused.load(Ordering::Relaxed) == 0 {
                        tracing::warn!(%error, "NATS rejected an event; further ones are only counted");
                    }
                }
                Err(_) => return, // the client is closed, which only happens at the end
            }
        }
        self.counters.note_sent(batch);
    }
}

/// Counts unsent events when dropped.
struct Left<'c> {
    events: u64,
    counters: &'c BusCounters,
}

impl Drop for Left<'_> {
    fn drop(&mut self) {
        add(&self.counters.refused, self.events);
    }
}

fn note_event(counters: &BusCounters, event: &async_nats::Event) {
    match event {
        async_nats::Event::Connected => counters.subscribers.store(1, Ordering::Relaxed),
        async_nats::Event::Disconnected | async_nats::Event::Closed => {
            counters.subscribers.store(0, Ordering::Relaxed);
            add(&counters.disconnects, 1);
        }
        async_nats::Event::ServerError(error) => {
            tracing::warn!(%error, "error from the NATS server");
        }
        _ => {}
    }
}

impl Bus for NatsBus {
    fn send<'a>(&'a mut self, batch: &'a Batch) -> Pin<Box<dyn Future<Output = ()> + 'a>> {
        Box::pin(self.publish(batch))
    }

    fn close<'a>(&'a mut self) -> Pin<Box<dyn Future<Output = ()> + 'a>> {
        Box::pin(async {
            // If the server is unavailable, the caller's time limit ends this.
            let _ = self.client.flush().await;
        })
    }
}

/// A subscription to a server.
pub struct NatsSubscriber {
    subscriber: async_nats::Subscriber,
    /// Held as long as the subscription.
    _client: async_nats::Client,
}

impl NatsSubscriber {
    /// Connects to `url` and subscribes to `subject` (wildcards `*` and `>` allowed).
    ///
    /// # Errors
    /// [`NatsError`]: the server is unavailable, or rejects the subject.
    pub async fn connect(url: &str, subject: &str) -> Result<NatsSubscriber, NatsError> {
        let fail = |source: Box<dyn std::error::Error + Send + Sync>| NatsError {
            url: url.to_owned(),
            source,
        };
        let client = async_nats::connect(url).await.map_err(|e| fail(e.into()))?;
        let subscribed = client.subscribe(subject.to_owned()).await;
        let subscriber = subscribed.map_err(|e| fail(e.into()))?;
        // The server has the subscription now, so later events arrive.
        client.flush().await.map_err(|e| fail(e.into()))?;
        Ok(NatsSubscriber {
            subscriber,
            _client: client,
        })
    }

    /// The next event; `None` when the connection is closed permanently.
    pub async fn recv(&mut self) -> Option<Event> {
        let message = self.subscriber.next().await?;
        let sequence = message
            .headers
            .as_ref()
            .and_then(|headers| headers.get(SEQUENCE_HEADER))
            .and_then(|value| value.as_str().parse().ok());
        Some(Event {
            topic: bytes::Bytes::copy_from_slice(message.subject.as_bytes()),
            sequence,
            payload: message.payload,
        })
    }
}
