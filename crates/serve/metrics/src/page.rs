//! Encodes a page of metrics in the format that its reader prefers: Prometheus's text, or OpenMetrics.

use std::fmt;

use prometheus_client::registry::Registry;

/// A format of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus's text format 0.0.4, which every reader accepts.
    Text,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl Format {
    /// The format that the header `Accept` prefers (RFC 9110, section 12.5.1). As with Prometheus's own clients,
    /// readers that name neither get text.
    pub fn accepted(accept: Option<&str>) -> Format {
        let ranges = accept.unwrap_or_default().split(',');
        let ranges: Vec<MediaRange<'_>> = ranges.filter_map(MediaRange::parse).collect();
        let weight = |format: Format| {
            // The most specific range that matches decides, whatever its weight.
            let matching = ranges.iter().filter_map(|range| {
                let specific = range.matches(format)?;
                Some((specific, range.weight))
            });
            matching.max_by(|a, b| a.partial_cmp(b).expect("weights are finite"))
        };
        let weight = |format| weight(format).unwrap_or((0, 0.0));
        let (text, open) = (weight(Format::Text), weight(Format::OpenMetrics));
        // A wildcard asks for nothing in particular.
        let is_named = open.0 > 1;
        if is_named && open.1 > 0.0 && open.1 >= text.1 {
            Format::OpenMetrics
        } else {
            Format::Text
        }
    }

    /// Value of `Content-Type`.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// The page of `registry`.
    ///
    /// # Errors
    /// If a collector fails.
    pub fn page(self, registry: &Registry) -> Result<String, fmt::Error> {
        let mut page = String::with_capacity(32 << 10);
        prometheus_client::encoding::text::encode(&mut page, registry)?;
        Ok(match self {
            Format::OpenMetrics => page,
            Format::Text => to_text(&page),
        })
    }
}

/// A range of media types in `Accept`.
struct MediaRange<'a> {
    name: &'a str,
    version: Option<&'a str>,
    weight: f64,
}

impl<'a> MediaRange<'a> {
    fn parse(text: &'a str) -> Option<MediaRange<'a>> {
        let mut parts = text.split(';').map(str::trim);
        let name = parts.next().filter(|name| name.contains('/'))?;
        let mut range = MediaRange {
            name,
            version: None,
            weight: 1.0,
        };
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                continue;
            };
            let value = value.trim().trim_matches('"');
            match key.trim() {
                key if key.eq_ignore_ascii_case("q") => {
                    let weight: f64 = value.parse().ok()?;
                    range.weight = if (0.0..=1.0).contains(&weight) {
                        weight
                    } else {
                        return None;
                    };
                }
                key if key.eq_ignore_ascii_case("version") => range.version = Some(value),
                _ => {}
            }
        }
        Some(range)
    }

    /// How specifically the range matches `format`, from 1; `None` if it does not match.
    fn matches(&self, format: Format) -> Option<u8> {
        let (name, group, version) = match format {
            Format::Text => ("text/plain", "text/*", "0.0.4"),
            Format::OpenMetrics => ("application/openmetrics-text", "application/*", "1.0.0"),
        };
        if self.name.eq_ignore_ascii_case(name) {
            match self.version {
                Some(asked) => (asked == version).then_some(4),
                None => Some(3),
            }
        } else if self.name.eq_ignore_ascii_case(group) {
            Some(1)
        } else {
            (self.name == "*/*").then_some(0)
        }
    }
}

/// Converts an OpenMetrics page to Prometheus's text format: counters are named as their samples, and features that the
/// text format lacks are omitted.
fn to_text(page: &str) -> String {
    let mut text = String::with_capacity(page.len() + (page.len() >> 5));
    let mut lines = page.split_inclusive('\n').peekable();
    while let Some(line) = lines.next() {
        let Some(rest) = line.strip_prefix("# HELP ") else {
            let is_comment = line.starts_with("# UNIT ") || line.starts_with("# EOF");
            if !is_comment {
                text.push_str(line);
            }
            continue;
        };
        let (name, help) = rest.split_once(' ').unwrap_or((rest, "\n"));
        let kind = lines
            .next_if(|next| next.starts_with("# TYPE "))
            .and_then(|next| next.trim_end().rsplit_once(' '))
            .map_or("unknown", |(_, kind)| kind);
        let (suffix, kind) = match kind {
            "counter" => ("_total", "counter"),
            "info" => ("_info", "gauge"),
            "stateset" => ("", "gauge"),
            "unknown" => ("", "untyped"),
            kind => ("", kind),
        };
        text.push_str("# HELP ");
        text.push_str(name);
        text.push_str(suffix);
        text.push(' ');
        // Quotes are not escaped here.
        text.push_str(&help.replace("\\\"", "\""));
        text.push_str("# TYPE ");
        text.push_str(name);
        text.push_str(suffix);
        text.push(' ');
        text.push_str(kind);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::gauge::Gauge;
    use prometheus_client::metrics::histogram::Histogram;
    use prometheus_client::registry::Unit;

    use super::*;

    #[test]
    fn the_reader_chooses_the_format() {
        use Format::{OpenMetrics, Text};
        // Prometheus 3's own header, and 2's.
        let three = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
                     application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;q=0.3,\
                     text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        let two = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                   text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let cases = [
            (None, Text),
            (Some(""), Text),
            (Some("*/*"), Text),
            (Some("application/json"), Text),
            (Some("text/html,application/xhtml+xml,*/*;q=0.8"), Text),
            (Some("application/*"), Text),
            (Some("text/plain"), Text),
            (Some("text/plain;version=0.0.4"), Text),
            (Some("application/openmetrics-text"), OpenMetrics),
            (
                Some("Application/OpenMetrics-Text; Version=1.0.0"),
                OpenMetrics,
            ),
            (
                Some("application/openmetrics-text; version=\"1.0.0\""),
                OpenMetrics,
            ),
            (Some("application/openmetrics-text;version=2.0.0"), Text),
            (Some("application/openmetrics-text;q=0"), Text),
            (Some("application/openmetrics-text;q=0, */*"), Text),
            (
                Some("application/openmetrics-text;q=0.3,text/plain;q=0.7"),
                Text,
            ),
            (
                Some("text/plain;q=0.3,application/openmetrics-text;q=0.7"),
                OpenMetrics,
            ),
            (Some("text/plain,application/openmetrics-text"), OpenMetrics),
            (
                Some("text/plain;version=0.0.4;q=0.1, application/openmetrics-text;q=0.2, */*;q=1"),
                OpenMetrics,
            ),
            (Some("application/openmetrics-text;q=seven"), Text),
            (Some("application/openmetrics-text;q=7"), Text),
            (Some(";;;,,q=1"), Text),
            (Some(two), OpenMetrics),
            (Some(three), OpenMetrics),
        ];
        for (accept, format) in cases {
            assert_eq!(Format::accepted(accept), format, "{accept:?}");
        }
    }

    #[test]
    fn text_has_the_samples_of_openmetrics_under_the_names_of_text() {
        let mut registry = Registry::default();
        let (counter, gauge) = (Counter::<u64>::default(), Gauge::<i64>::default());
        let times = Histogram::new([0.5]);
        counter.inc_by(3);
        times.observe(1.0);
        registry.register("asked", "Questions", counter);
        registry.register("open", "Open \"questions\"", gauge);
        registry.register_with_unit("wait", "Waiting", Unit::Seconds, times);
        let open = Format::OpenMetrics.page(&registry).unwrap();
        assert!(open.ends_with("# EOF\n"), "{open}");
        let text = Format::Text.page(&registry).unwrap();
        let expected = "\
            # HELP asked_total Questions.\n# TYPE asked_total counter\nasked_total 3\n\
            # HELP open Open \"questions\".\n# TYPE open gauge\nopen 0\n\
            # HELP wait_seconds Waiting.\n# TYPE wait_seconds histogram\n\
            wait_seconds_sum 1.0\nwait_seconds_count 1\nwait_seconds_bucket{le=\"0.5\"} 0\n\
            wait_seconds_bucket{le=\"+Inf\"} 1\n";
        assert_eq!(text, expected);
    }
}
