//! Server-sent events as browsers read them (WHATWG HTML, section 9.2.6). No I/O.
//!
//! Lines end with LF, CR LF or CR, also mixed; a blank line ends an event; lines that begin with a colon are comments;
//! the values of several `data` lines are joined by line feeds; a byte order mark may begin the stream.
//!
//! [`Scanner`] follows a stream whose bytes arrive in pieces. [`events`] reads events that are complete.

use std::borrow::Cow;

use memchr::memchr2;

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// Kind of the current line, by its first byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Empty,
    Comment,
    Field,
}

/// Follows a stream of events that arrives in pieces. Reads each byte once.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Scanner {
    line: Line,
    /// Whether a line feed that comes next belongs to the line ending before it.
    after_cr: bool,
    /// Whether the current event has a field.
    in_event: bool,
    /// Number of bytes of the byte order mark so far.
    mark: usize,
}

impl Scanner {
    /// Reads the next bytes of the stream. Returns how many of them complete events, or comments between events; 0 if the
    /// current event has not ended.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> usize {
        let (mut at, mut end) = (0, 0);
        while let Some(&byte) = bytes.get(at) {
            if std::mem::take(&mut self.after_cr) && byte == b'\n' {
                at += 1;
                if !self.in_event {
                    end = at;
                }
                continue;
            }
            if self.mark < BYTE_ORDER_MARK.len() {
                if byte == BYTE_ORDER_MARK[self.mark] {
                    self.mark += 1;
                    at += 1;
                    continue;
                }
                if self.mark > 0 {
                    self.line = Line::Field; // it began like a mark
                }
                self.mark = BYTE_ORDER_MARK.len();
            }
            if self.line == Line::Empty {
                if matches!(byte, b'\n' | b'\r') {
                    at += 1;
                    self.after_cr = byte == b'\r';
                    self.in_event = false;
                    end = at;
                    continue;
                }
                self.line = if byte == b':' {
                    Line::Comment
                } else {
                    Line::Field
                };
            }
            let Some(length) = memchr2(b'\n', b'\r', &bytes[at..]) else {
                break;
            };
            at += length + 1;
            self.after_cr = bytes[at - 1] == b'\r';
            self.in_event |= self.line == Line::Field;
            self.line = Line::Empty;
            if !self.in_event {
                end = at;
            }
        }
        end
    }

    /// Returns how many of the next `bytes` belong to the event that has begun; all of them if it does not end there.
    pub(super) fn end_of_event(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while let Some(length) = memchr2(b'\n', b'\r', &bytes[at..]) {
            let line = &bytes[at..=at + length];
            at += line.len();
            if self.feed(line) > 0 {
                return at;
            }
        }
        bytes.len()
    }

    /// Returns true if `bytes` are complete events, by a quick check. If false, call [`feed`](Self::feed).
    pub(super) fn takes_whole(&mut self, bytes: &[u8]) -> bool {
        // Two line feeds end whatever line there is, and the event.
        let is_whole = self.is_between() && bytes.ends_with(b"\n\n");
        if is_whole {
            self.mark = BYTE_ORDER_MARK.len();
        }
        is_whole
    }

    /// Whether a line that is no comment has begun.
    pub(super) fn is_in_field(&self) -> bool {
        self.line == Line::Field
    }

    /// Whether no line and no event has begun.
    fn is_between(&self) -> bool {
        let is_marked = matches!(self.mark, 0 | 3); // none, or a whole one
        self.line == Line::Empty && !self.in_event && !self.after_cr && is_marked
    }

    /// Whether the last byte was a carriage return, after which a line feed may follow.
    pub(super) fn is_after_cr(&self) -> bool {
        self.after_cr
    }
}

/// Whether `bytes` look like the beginning of a stream of events.
pub(super) fn begins(bytes: &[u8]) -> bool {
    let bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    let starts = |of: &&[u8]| bytes.starts_with(of);
    [&b"data:"[..], b"event:", b"id:", b"retry:", b": "]
        .iter()
        .any(starts)
}

/// An event of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Event<'a> {
    /// Range of the event, including the comments before it.
    pub(super) start: usize,
    pub(super) end: usize,
    /// Its `event` field; empty without one.
    pub(super) name: &'a [u8],
    /// Its `data`; empty without any.
    pub(super) data: Cow<'a, [u8]>,
    /// A field named `error`, by which llama.cpp reported errors.
    pub(super) error: Option<&'a [u8]>,
    /// The first line of an unknown field, which browsers ignore: text that is no event.
    pub(super) stray: Option<&'a [u8]>,
    /// Whether a blank line ends it. Browsers drop an event without one.
    pub(super) is_whole: bool,
}

impl Event<'_> {
    /// Whether it has content: engines and proxies keep connections open by comments, blank lines, events without data and
    /// `ping` events (Anthropic's API), which are no part of an answer.
    pub(super) fn has_content(&self) -> bool {
        let is_empty = matches!(self.data.trim_ascii(), b"" | b"{}" | b"[]" | b"null");
        self.error.is_some() || !is_empty && self.name != b"ping"
    }

    /// Returns its data with a question mark for each byte that is not UTF-8, where browsers read a replacement character.
    /// Every part is where it is in the data.
    pub(super) fn text(&self) -> Cow<'_, [u8]> {
        if std::str::from_utf8(&self.data).is_ok() {
            return Cow::Borrowed(&self.data);
        }
        let mut text = Vec::with_capacity(self.data.len());
        for chunk in self.data.utf8_chunks() {
            text.extend_from_slice(chunk.valid().as_bytes());
            text.resize(text.len() + chunk.invalid().len(), b'?');
        }
        text.into()
    }

    /// Where each line of its data begins: in the data, and in `bytes`, of which it is an event.
    pub(super) fn data_lines(&self, bytes: &[u8]) -> Vec<(usize, usize)> {
        let mut lines = Events {
            bytes: &bytes[..self.end],
            at: self.start,
            start: self.start,
        };
        if self.start == 0 && bytes.starts_with(BYTE_ORDER_MARK) {
            lines.at = BYTE_ORDER_MARK.len();
        }
        let (mut found, mut of_data) = (Vec::new(), 0);
        loop {
            let begin = lines.at;
            let Some(line) = lines.line() else {
                return found;
            };
            if let (b"data", value) = field(line) {
                found.push((of_data, begin + line.len() - value.len()));
                of_data += value.len() + 1;
            }
        }
    }
}

/// Iterates over the events of `bytes`; only the last one may be cut off.
pub(super) fn events(bytes: &[u8]) -> Events<'_> {
    let at = match bytes.strip_prefix(BYTE_ORDER_MARK) {
        Some(_) => BYTE_ORDER_MARK.len(),
        None => 0,
    };
    Events {
        bytes,
        at,
        start: 0,
    }
}

/// Whether an event of `bytes` [has content](Event::has_content).
pub(super) fn have_content(bytes: &[u8]) -> bool {
    events(bytes).any(|event| event.has_content())
}

/// Name and value of the field in `line`. The name of a comment is empty.
fn field(line: &[u8]) -> (&[u8], &[u8]) {
    let name = memchr::memchr(b':', line).unwrap_or(line.len());
    let value = line.get(name + 1..).unwrap_or_default();
    (&line[..name], value.strip_prefix(b" ").unwrap_or(value))
}

/// Iterator of [`events`].
#[derive(Debug)]
pub(super) struct Events<'a> {
    bytes: &'a [u8],
    at: usize,
    /// End of the event before.
    start: usize,
}

impl<'a> Events<'a> {
    /// The next line, without its end. `None` at the end of the bytes.
    fn line(&mut self) -> Option<&'a [u8]> {
        let rest = self.bytes.get(self.at..).filter(|rest| !rest.is_empty())?;
        let Some(length) = memchr2(b'\n', b'\r', rest) else {
            self.at = self.bytes.len();
            return Some(rest);
        };
        let is_crlf = rest[length] == b'\r' && rest.get(length + 1) == Some(&b'\n');
        self.at += length + if is_crlf { 2 } else { 1 };
        Some(&rest[..length])
    }
}

impl<'a> Iterator for Events<'a> {
    type Item = Event<'a>;

    fn next(&mut self) -> Option<Event<'a>> {
        let mut event = Event {
            start: self.start,
            end: 0,
            name: b"",
            data: Cow::Borrowed(b""),
            error: None,
            stray: None,
            is_whole: false,
        };
        let (mut has_field, mut has_data) = (false, false);
        while let Some(line) = self.line() {
            if line.is_empty() {
                self.start = self.at;
                if !has_field {
                    event.start = self.at;
                    continue; // no event
                }
                event.is_whole = true;
                event.end = self.at;
                return Some(event);
            }
            let (name, value) = field(line);
            match name {
                b"" => continue, // a comment
                b"data" if has_data => {
                    let data = event.data.to_mut();
                    data.push(b'\n');
                    data.extend_from_slice(value);
                }
                b"data" => {
                    event.data = Cow::Borrowed(value);
                    has_data = true;
                }
                b"event" => event.name = value,
                b"error" => event.error = Some(value),
                b"id" | b"retry" => {}
                _ => event.stray = event.stray.or(Some(line)),
            }
            has_field = true;
        }
        self.start = self.at;
        event.end = self.at;
        has_field.then_some(event)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Nothing that only keeps a connection open is content, and one event among it is.
        #[test]
        fn comments_and_empty_events_are_no_content(
            parts in prop::collection::vec(prop::sample::select(&[
                ": keep-alive\n", ":\n", "\n", "\n\n", "data:\n\n", "data: \n\n", "id: 7\n", "retry: 100\n",
                "event: ping\n\n", "event: ping\ndata: {\"type\":\"ping\"}\n\n", "data: {}\n\n", ": data: x\n",
            ][..]), 0..12),
            at in 0usize..12,
            line in prop::sample::select(&["\n", "\r\n", "\r"][..]),
        ) {
            let text = |parts: &[&str]| parts.concat().replace('\n', line);
            prop_assert!(!have_content(text(&parts).as_bytes()));
            let (before, after) = parts.split_at(at.min(parts.len()));
            let whole = [before, &["\n\ndata: {\"choices\":[]}\n\n"], after].concat();
            prop_assert!(have_content(text(&whole).as_bytes()));
        }
    }

    /// Ends of lines of `text`: where a CR LF ends, its CR ends a line as well.
    fn is_line_end(text: &[u8], at: usize) -> bool {
        matches!(text[at], b'\n' | b'\r')
    }

    /// Offsets of `text` at which no event is under way, found line by line over all of it.
    fn boundaries(text: &[u8]) -> Vec<usize> {
        let mut found = Vec::new();
        let (mut line, mut in_event) = (Vec::new(), false);
        for at in 0..text.len() {
            if !is_line_end(text, at) {
                line.push(text[at]);
                continue;
            }
            if text[at] == b'\n' && at > 0 && text[at - 1] == b'\r' {
                // The second half of an ending.
                if !in_event && line.is_empty() {
                    found.push(at + 1);
                }
                continue;
            }
            let whole = std::mem::take(&mut line);
            let is_first = whole.len() == at;
            let content = match whole.strip_prefix(BYTE_ORDER_MARK) {
                Some(rest) if is_first => rest,
                _ => &whole,
            };
            match content.first() {
                None => in_event = false,
                Some(b':') => {}
                Some(_) => in_event = true,
            }
            if !in_event {
                found.push(at + 1);
            }
        }
        found
    }

    /// Names and data of the whole events of `text`, by text replacement.
    fn naive(text: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
        let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
        // Every byte is one character.
        let text: String = text.iter().map(|&byte| char::from(byte)).collect();
        let text = text.replace("\r\n", "\n").replace('\r', "\n");
        let bytes = |text: &str| text.chars().map(|c| u8::try_from(c).unwrap()).collect();
        let mut found = Vec::new();
        let (mut name, mut data, mut any) = (String::new(), None::<String>, false);
        let lines: Vec<&str> = text.split('\n').collect();
        for line in &lines[..lines.len() - 1] {
            if line.is_empty() {
                if std::mem::take(&mut any) {
                    let data = data.take().unwrap_or_default();
                    found.push((bytes(&std::mem::take(&mut name)), bytes(&data)));
                }
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            any |= !field.is_empty();
            match field {
                "data" => {
                    data = Some(match data.take() {
                        Some(before) => before + "\n" + value,
                        None => value.to_owned(),
                    });
                }
                "event" => value.clone_into(&mut name),
                _ => {}
            }
        }
        found
    }

    /// Streams from a broken pen: every piece of the grammar, in any order.
    pub(crate) fn streams() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            4 => Just(&b"\n"[..]),
            3 => Just(&b"\r"[..]),
            3 => Just(&b"\r\n"[..]),
            3 => Just(&b"data: "[..]),
            2 => Just(&b"data:"[..]),
            1 => Just(&b"data"[..]),
            1 => Just(&b"event: error"[..]),
            1 => Just(&b"id: 7"[..]),
            1 => Just(&b"retry: 100"[..]),
            2 => Just(&b": keep-alive"[..]),
            2 => Just(&b"{\"x\":1}"[..]),
            1 => Just(&b"[DONE]"[..]),
            1 => Just(&b" "[..]),
            1 => Just(BYTE_ORDER_MARK),
            1 => Just(&b"\xEF\xBB"[..]),
        ];
        let pieces = prop::collection::vec(piece, 0..40);
        (any::<bool>(), pieces).prop_map(|(marked, pieces)| {
            let mark = if marked { BYTE_ORDER_MARK } else { b"" };
            [mark, &pieces.concat()].concat()
        })
    }

    proptest! {
        #[test]
        fn whatever_the_chunks_whole_events_pass_as_soon_as_they_end(
            stream in streams(),
            cuts in prop::collection::vec(1usize..9, 1..9),
        ) {
            let boundaries = boundaries(&stream);
            let mut scanner = Scanner::default();
            let (mut fed, mut passed) = (0, 0);
            for cut in cuts.iter().cycle() {
                if fed == stream.len() {
                    break;
                }
                let piece = &stream[fed..(fed + cut).min(stream.len())];
                if passed == fed && scanner.takes_whole(piece) {
                    fed += piece.len();
                    passed = fed;
                } else {
                    let end = scanner.feed(piece);
                    if end > 0 {
                        passed = fed + end;
                    }
                    fed += piece.len();
                }
                let expected = boundaries.iter().rev().find(|&&at| at <= fed).copied();
                prop_assert_eq!(passed, expected.unwrap_or(0), "of {} bytes", fed);
            }
        }

        #[test]
        fn events_are_those_of_a_parser_of_whole_texts(stream in streams()) {
            let whole: Vec<_> = events(&stream)
                .filter(|event| event.is_whole)
                .map(|event| (event.name.to_vec(), event.data.into_owned()))
                .collect();
            prop_assert_eq!(whole, naive(&stream));
            let mut end = 0;
            for event in events(&stream) {
                prop_assert!(event.start >= end && event.end > event.start);
                end = event.end;
            }
        }
    }

    #[test]
    fn endings_of_lines_may_be_mixed() {
        for stream in [
            "data: a\n\ndata: b\n\n",
            "data: a\r\n\r\ndata: b\r\n\r\n",
            "data: a\r\rdata: b\r\r",
            "data: a\r\n\ndata: b\n\r\n",
            "\u{feff}data: a\n\r: c\ndata: b\r\n\r",
            "data:a\n\nid: 1\r\n: c\rretry: 5\ndata:b\n\n",
        ] {
            let data: Vec<_> = events(stream.as_bytes()).map(|of| of.data).collect();
            assert_eq!(data, [&b"a"[..], b"b"], "{stream:?}");
            assert_eq!(
                Scanner::default().feed(stream.as_bytes()),
                stream.len(),
                "{stream:?}"
            );
        }
        let several = b"event: x\ndata: {\ndata:\ndata:  }\n\n";
        let event = events(several).next().unwrap();
        assert_eq!((event.name, &*event.data), (&b"x"[..], &b"{\n\n }"[..]));
        let cut = events(b"data: 1\n\ndata: 2\n").last().unwrap();
        assert_eq!((&*cut.data, cut.is_whole), (&b"2"[..], false));
    }

    #[test]
    fn each_byte_is_read_once() {
        // Time is not measured here: the scanner has no memory but its state.
        let mut scanner = Scanner::default();
        for _ in 0..100_000 {
            assert_eq!(scanner.feed(b"a"), 0);
        }
        assert_eq!(scanner.feed(b"\n"), 0);
        assert_eq!(scanner.feed(b"\n"), 1);
        for _ in 0..1_000 {
            assert_eq!(scanner.feed(b": c\n"), 4, "a comment between events");
        }
        assert_eq!(scanner.feed(b"data: a\n: c\n"), 0, "a comment within one");
    }
}
