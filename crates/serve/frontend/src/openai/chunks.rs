//! The chunks of a chat's stream, read again: other APIs render their events from them.

use serde_json::Value;

/// Splits a stream of server-sent events into chunks. A frame may end within an event.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    /// The rest of the last frame: a part of an event.
    partial: Vec<u8>,
}

impl Chunks {
    /// Calls `each` with the chunks that `frame` completes. Comments and `[DONE]` are none.
    pub(super) fn take(&mut self, frame: &[u8], mut each: impl FnMut(&Value)) {
        let joined;
        let mut rest = if self.partial.is_empty() {
            frame
        } else {
            self.partial.extend_from_slice(frame);
            joined = std::mem::take(&mut self.partial);
            &joined[..]
        };
        while let Some(end) = memchr::memmem::find(rest, b"\n\n") {
            let (event, after) = rest.split_at(end);
            rest = &after[2..];
            if let Some(data) = event.strip_prefix(b"data: ")
                && let Ok(chunk) = serde_json::from_slice::<Value>(data)
            {
                each(&chunk);
            }
        }
        self.partial.extend_from_slice(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_the_same_however_the_stream_is_cut() {
        let stream = b": ping\n\ndata: {\"n\":1}\n\ndata: {\"n\":2}\n\ndata: \xff\n\ndata: {\"n\":3}\n\ndata: [DONE]\n\n";
        let mut cuts = 0;
        for first in 0..=stream.len() {
            for second in first..=stream.len() {
                let mut chunks = Chunks::default();
                let mut found = Vec::new();
                for frame in [&stream[..first], &stream[first..second], &stream[second..]] {
                    chunks.take(frame, |chunk| found.push(chunk["n"].clone()));
                }
                assert_eq!(found, [1, 2, 3], "cut at {first} and {second}");
                cuts += 1;
            }
        }
        assert!(cuts > 1000);
    }
}
