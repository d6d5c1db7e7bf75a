//! Allocation traces.
//!
//! ```text
//! # key: value
//! a ID BYTES STREAM     allocation
//! f ID STREAM           free; STREAM is the stream of the allocation
//! r ID STREAM           the block is also used on STREAM
//! i N                   iteration N starts
//! ```

use std::io::BufRead;
use std::str::{FromStr, SplitAsciiWhitespace};

use super::allowance::{Allowance, EVENTS};
use super::error::{Fault, Reason};
use super::lines::Lines;
use super::program::{Builder, Program};
use crate::text::one_line;

/// The most header lines of a trace.
const HEADERS_MAX: usize = 1024;

/// Whether a line is one of a trace, by its first word.
pub(super) fn is_line(line: &str) -> bool {
    line.starts_with('#') || matches!(line.split_ascii_whitespace().next(), Some("a" | "f" | "r" | "i"))
}

pub(super) fn parse(content: impl BufRead, name: String, allowance: &Allowance) -> Result<Program, Fault> {
    let mut builder = Builder::new(name, 0);
    let mut lines = Lines::new(content);
    while let Some(line) = lines.next()? {
        let added = event(line, &mut builder).and_then(|()| allowance.check(builder.bytes(), EVENTS));
        added.map_err(|reason| match reason {
            // Text that is no trace may begin with a heading.
            Reason::UnknownKind(word, _) if builder.is_empty() => Fault::file(Reason::Unrecognised {
                found: format!("text with a line that begins with {:?}", one_line(&word, 40)),
                hint: "; a trace's lines start with #, a, f, r or i",
            }),
            reason => Fault::new(lines.location(), reason),
        })?;
    }
    if builder.is_empty() { Err(Fault::file(Reason::NoEvents)) } else { builder.finish().map_err(Fault::file) }
}

fn event(line: &str, builder: &mut Builder) -> Result<(), Reason> {
    if let Some(header) = line.strip_prefix('#') {
        // A comment is a header without a key.
        let (key, value) = header.split_once(':').unwrap_or(("", header));
        if builder.header(key.trim(), value.trim()) > HEADERS_MAX {
            return Err(Reason::TooMany("1024 header lines"));
        }
        return Ok(());
    }
    let mut fields = line.split_ascii_whitespace();
    let Some(kind) = fields.next() else { return Ok(()) };
    match kind {
        "a" => {
            let (id, bytes, stream) =
                (number(&mut fields, "ID")?, number(&mut fields, "size")?, number(&mut fields, "stream")?);
            end(fields)?;
            if !builder.alloc(id, bytes, stream)? {
                return Err(Reason::AlreadyLive(id));
            }
        }
        "f" => {
            let (id, freed) = (number(&mut fields, "ID")?, number(&mut fields, "stream")?);
            end(fields)?;
            let block = builder.free(id)?.ok_or(Reason::NotLive(id))?;
            if block.stream != freed {
                return Err(Reason::WrongStream { allocated: block.stream, freed });
            }
        }
        "r" => {
            let (id, stream) = (number(&mut fields, "ID")?, number(&mut fields, "stream")?);
            end(fields)?;
            if !builder.record_stream(id, stream)? {
                return Err(Reason::NotLive(id));
            }
        }
        "i" => {
            let iteration = number(&mut fields, "iteration")?;
            end(fields)?;
            builder.iteration(iteration)?;
        }
        _ => return Err(Reason::UnknownKind(kind.into(), "a, f, r, i or #")),
    }
    Ok(())
}

fn number<T: FromStr>(fields: &mut SplitAsciiWhitespace<'_>, field: &'static str) -> Result<T, Reason> {
    let text = fields.next().ok_or(Reason::MissingField(field))?;
    // Signs are no part of the format, though the number parser takes a plus.
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = if digits { text.parse().ok() } else { None };
    number.ok_or_else(|| Reason::BadNumber { field, text: text.into() })
}

fn end(mut fields: SplitAsciiWhitespace<'_>) -> Result<(), Reason> {
    fields.next().map_or(Ok(()), |field| Err(Reason::TrailingField(field.into())))
}

#[cfg(test)]
mod tests {
    use super::super::program::Event;
    use super::*;

    fn read(text: &str) -> Result<Program, String> {
        parse(text.as_bytes(), "file".into(), &Allowance::read(text.len(), text.len()))
            .map_err(|fault| fault.at("t".as_ref()).to_string())
    }

    #[test]
    fn reads_every_kind_of_line() {
        let program = read("# name: gpt\n# what: a: b\n\na 0 100 9\ni 3\nr 0 0\na 1 0 0\nf 0 9\n").unwrap();
        assert_eq!(program.name, "gpt");
        assert_eq!(program.headers[1], ("what".into(), "a: b".into()));
        assert_eq!(program.streams, [0, 9]);
        assert_eq!(
            program.events,
            [
                Event::Alloc { slot: 0, bytes: 100, stream: 1 },
                Event::Iteration(3),
                Event::RecordStream { slot: 0, stream: 0 },
                Event::Alloc { slot: 1, bytes: 0, stream: 0 },
                Event::Free { slot: 0 },
            ]
        );
        assert_eq!((program.operations(), program.peak_requested_bytes), (3, 100));
        assert_eq!(read("i 1").unwrap().name, "file");
        assert_eq!(read("# name: \x1b[31mred\ni 1").unwrap().name, "\u{fffd}[31mred");
    }

    #[test]
    fn a_trace_has_events() {
        for text in ["", "\n", " \n\t\r\n\n", "# name: x\n", "# name: x\n\n# y"] {
            assert_eq!(read(text).unwrap_err(), "t: the file has no events, so there is nothing to replay", "{text:?}");
        }
        assert_eq!(read(&("\n".repeat(100_000) + "a 0 1 0\n\n")).unwrap().operations(), 1);
    }

    #[test]
    fn errors_name_line_and_reason() {
        let long = format!("# {}", "x".repeat(70_000));
        for (text, expected) in [
            ("a 1 2 0\nx 1", "t:2: unknown kind \"x\"; expected a, f, r, i or #"),
            (
                "# Notes\nx 1",
                "t: not an allocation trace, a PyTorch memory snapshot or an RMM log: found text with a line that begins with \
                 \"x\"; a trace's lines start with #, a, f, r or i",
            ),
            ("# k: v\na 1 2", "t:2: the field stream is missing"),
            ("a 1 -2 0", "t:1: \"-2\" is not a valid size"),
            ("a +1 2 0", "t:1: \"+1\" is not a valid ID"),
            ("a 1 18446744073709551616 0", "t:1: \"18446744073709551616\" is not a valid size"),
            ("i 4294967296", "t:1: \"4294967296\" is not a valid iteration"),
            ("a 1 2 0 4", "t:1: unexpected \"4\" at the end of the line"),
            ("a 1 2 0\na 1 2 0", "t:2: ID 1 is already allocated"),
            ("f 1 0", "t:1: ID 1 is not allocated: it never was, or has been freed"),
            ("r 1 0", "t:1: ID 1 is not allocated: it never was, or has been freed"),
            ("a 1 2 0\nf 1 0\nf 1 0", "t:3: ID 1 is not allocated: it never was, or has been freed"),
            ("a 1 2 3\nf 1 0", "t:2: the free names stream 0, the allocation named stream 3"),
            ("a 1 18446744073709551615 0\na 2 1 0", "t:2: the bytes allocated exceed 64 bits"),
            (&long, "t:1: the line is longer than 64 KiB"),
        ] {
            assert_eq!(read(text).unwrap_err(), expected);
        }
        let fault = parse(&b"a 0 1 0\n\xff"[..], String::new(), &Allowance::default()).unwrap_err();
        assert_eq!(fault.at("t".as_ref()).to_string(), "t:2: the text is not UTF-8");
        assert!(read(&"# k: v\n".repeat(HEADERS_MAX + 1)).unwrap_err().contains("more than 1024 header lines"));
    }

    #[test]
    fn events_take_little_memory_for_few_stored_bytes() {
        let text = "a 0 1 0\nf 0 0\n".repeat(5 << 18);
        assert_eq!(read(&text).unwrap().events.len(), 5 << 19);
        let fault = parse(text.as_bytes(), String::new(), &Allowance::read(text.len() / 1000, text.len())).unwrap_err();
        assert!(fault.at("t".as_ref()).to_string().contains("hold more than a recording of that size can"));
        // Many long headers.
        let headers = format!("# x: {}\n", "y".repeat(60_000)).repeat(1000);
        assert!(parse(headers.as_bytes(), String::new(), &Allowance::read(1000, headers.len())).is_err());
    }
}
