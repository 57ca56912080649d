//! Events as a subscriber receives them: decoded, as text or JSON, and counted.

use std::collections::HashMap;

use bytes::Bytes;
use slipstream_base::text::{counted, foreign, foreign_json};

use crate::{DecodeError, Event, FpmMessage, KvEvent, KvEventBatch};

/// Counters of received events.
#[derive(Debug, Default)]
pub struct Tally {
    /// Events.
    pub events: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
    /// Messages that are not events.
    pub bad: u64,
    /// Events missing according to the sequences of each source and topic.
    pub missing: u64,
    next: HashMap<(String, Bytes), u64>,
}

impl Tally {
    /// Counts an event of `source`.
    pub fn note(&mut self, source: &str, event: &Event, sequence: Option<u64>) {
        self.events += 1;
        self.bytes += event.payload.len() as u64;
        let Some(sequence) = sequence else { return };
        let place = (source.to_owned(), event.topic.clone());
        let next = self.next.entry(place).or_insert(sequence);
        // A lower one is a publisher that restarted.
        self.missing += sequence.saturating_sub(*next);
        *next = sequence + 1;
    }
}

/// A decoded event.
#[derive(Debug)]
pub struct ReceivedEvent {
    /// Its topic; if that is empty, as with KV events, the publisher's address.
    topic: String,
    source: String,
    /// Its content.
    pub message: Message,
}

impl ReceivedEvent {
    /// Decodes an event of `source`.
    ///
    /// # Errors
    /// The payload is not an event.
    pub fn read(source: &str, event: &Event) -> Result<ReceivedEvent, String> {
        let topic = String::from_utf8_lossy(&event.topic).into_owned();
        let len = event.payload.len();
        match Message::decode(&topic, &event.payload) {
            Ok(message) => Ok(ReceivedEvent {
                topic,
                source: source.to_owned(),
                message,
            }),
            Err(error) => Err(format!("{source}: an event of {len} bytes: {error}")),
        }
    }

    /// The event as a line of text.
    pub fn line(&self, sequence: Option<u64>, json: bool) -> String {
        let ReceivedEvent {
            topic,
            source,
            message,
        } = self;
        if json {
            let event = message.json();
            let line = serde_json::json!({"topic": topic, "sequence": sequence, "event": event});
            return format!("{}\n", foreign_json(&line.to_string()));
        }
        let sequence = sequence.map_or(String::new(), |n| format!(" #{n}"));
        let topic = if topic.is_empty() { source } else { topic };
        let line = format!("{topic}{sequence} {}", message.text());
        format!("{}\n", foreign(&line))
    }
}

/// Content of an event.
#[derive(Debug)]
pub enum Message {
    /// Forward-pass metrics.
    Fpm(Box<FpmMessage>),
    /// KV events.
    Kv(KvEventBatch),
}

impl Message {
    /// Forward-pass metrics have `.fpm.` in their topic. All others are KV events, whose topic is
    /// the engine's configuration.
    fn decode(topic: &str, payload: &[u8]) -> Result<Message, DecodeError> {
        if topic.contains(".fpm.") {
            return FpmMessage::decode(payload).map(|fpm| Message::Fpm(Box::new(fpm)));
        }
        KvEventBatch::decode(payload).map(Message::Kv)
    }

    /// Number of a pass among those of its rank.
    pub fn counter(&self) -> Option<u64> {
        match self {
            Message::Fpm(fpm) => Some(fpm.counter_id),
            Message::Kv(_) => None,
        }
    }

    fn json(&self) -> serde_json::Value {
        let value = match self {
            Message::Fpm(fpm) => serde_json::to_value(fpm),
            Message::Kv(batch) => serde_json::to_value(batch),
        };
        value.expect("numbers and strings are JSON; NaN becomes null")
    }

    fn text(&self) -> String {
        match self {
            Message::Fpm(fpm) => {
                let (s, q) = (&fpm.scheduled_requests, &fpm.queued_requests);
                if fpm.wall_time == 0.0 && s.num_prefill_requests + s.num_decode_requests == 0 {
                    return format!("{}/dp{} idle", fpm.worker_id, fpm.dp_rank);
                }
                format!(
                    "{}/dp{} pass {} {:.3} ms: prefill {} ({}, {} cached), decode {} ({} of context); waiting {} + {}",
                    fpm.worker_id,
                    fpm.dp_rank,
                    fpm.counter_id,
                    fpm.wall_time * 1e3,
                    s.num_prefill_requests,
                    counted(s.sum_prefill_tokens, "token"),
                    s.sum_prefill_kv_tokens,
                    s.num_decode_requests,
                    counted(s.sum_decode_kv_tokens, "token"),
                    q.num_prefill_requests,
                    q.num_decode_requests,
                )
            }
            Message::Kv(batch) => {
                let events: Vec<String> = batch.events.iter().map(kv_text).collect();
                let rank = batch.data_parallel_rank.unwrap_or(0);
                let mut text = format!("dp{rank} {}", events.join("; "));
                if let Some(first) = &batch.unreadable.first {
                    let count = counted(batch.unreadable.events, "unreadable event");
                    text = format!("{text} ({count}: {first})");
                }
                text
            }
        }
    }
}

fn kv_text(event: &KvEvent) -> String {
    match event {
        KvEvent::BlockStored(stored) => format!(
            "stored {} of {} ({})",
            counted(stored.block_hashes.len() as u64, "block"),
            stored.block_size,
            match stored.token_ids.len() {
                0 => "tokens not known".to_owned(),
                tokens => counted(tokens as u64, "token"),
            }
        ),
        KvEvent::BlockRemoved(removed) => {
            let blocks = removed.block_hashes.len() as u64;
            format!("removed {}", counted(blocks, "block"))
        }
        KvEvent::AllBlocksCleared {} => "cleared all blocks".to_owned(),
        KvEvent::Unreadable { block_hashes: None } => {
            "unreadable; any block may be gone".to_owned()
        }
        KvEvent::Unreadable {
            block_hashes: Some(hashes),
        } => format!(
            "unreadable; names {}",
            counted(hashes.len() as u64, "block")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_counted_by_topic() {
        let event = |topic: &'static str, sequence| Event {
            topic: Bytes::from_static(topic.as_bytes()),
            sequence: Some(sequence),
            payload: Bytes::from_static(&[0; 3]),
        };
        let mut tally = Tally::default();
        for (topic, sequence) in [
            ("a", 5),
            ("b", 0),
            ("a", 6),
            ("a", 9),
            ("b", 1),
            ("a", 0),
            ("a", 1),
        ] {
            tally.note("here", &event(topic, sequence), Some(sequence));
        }
        assert_eq!((tally.events, tally.bytes, tally.missing), (7, 21, 2));
    }
}
