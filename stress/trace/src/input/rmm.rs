//! Logs of the RAPIDS Memory Manager: CSV with one row per allocation or free, joined by address.

use std::io::BufRead;

use super::allowance::{Allowance, EVENTS};
use super::error::{Fault, Reason};
use super::lines::Lines;
use super::program::{Builder, Program, Recorder};
use super::recording::Recording;

/// The columns, which the first line names.
pub(super) const HEADER: [&str; 6] = ["Thread", "Time", "Action", "Pointer", "Size", "Stream"];

/// The actions of the rows.
const ACTIONS: &str = "allocate, free, deallocate or allocate failure";

/// Whether a line is the header.
pub(super) fn is_header(line: &str) -> bool {
    line.split(',').map(str::trim).eq(HEADER)
}

/// What rows leave to note.
#[derive(Default)]
struct Notes {
    failed: u64,
    largest_failed: Option<u64>,
    null: u64,
    other_stream: u64,
    other_size: u64,
}

/// Adds a row to the recording.
fn add(recording: &mut Recording, notes: &mut Notes, line: &str) -> Result<(), Reason> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let [_, _, action, at, size, stream] = fields[..] else {
        let beyond = fields.get(HEADER.len()).map(|&field| Reason::TrailingField(field.into()));
        return Err(beyond.unwrap_or(Reason::MissingField(HEADER[fields.len().min(HEADER.len() - 1)])));
    };
    let is_alloc = match action {
        "allocate" => true,
        "free" | "deallocate" => false,
        "allocate failure" => {
            notes.failed += 1;
            notes.largest_failed = notes.largest_failed.max(number(size, "Size").ok());
            return Ok(());
        }
        _ => return Err(Reason::UnknownKind(action.into(), ACTIONS)),
    };
    let pointer = if at == "(nil)" { 0 } else { number(at, "Pointer")? };
    let (size, stream) = (number(size, "Size")?, number(stream, "Stream")?);
    if pointer == 0 {
        notes.null += 1;
    } else if is_alloc {
        recording.alloc(pointer, size, stream)?;
    } else if let Some(live) = recording.freed(pointer, size, stream)? {
        notes.other_size += u64::from(live.bytes != size);
        if live.stream != stream {
            notes.other_stream += 1;
            recording.builder.record_stream(pointer, stream)?;
        }
        recording.free(pointer)?;
    }
    Ok(())
}

pub(super) fn parse(content: impl BufRead, name: String, allowance: &Allowance) -> Result<Program, Fault> {
    let (mut recording, mut notes) = (Recording::new(Builder::new(name, 0)), Notes::default());
    let (mut lines, mut cut_off) = (Lines::new(content), false);
    while let Some(line) = lines.next()? {
        // Logs that were appended to one another repeat the header.
        if line.trim().is_empty() || is_header(line) {
            continue;
        }
        let added = add(&mut recording, &mut notes, line).and_then(|()| allowance.check(recording.bytes(), EVENTS));
        match added {
            // A program that was killed leaves a part of a line.
            Err(_) if !lines.ended() && !recording.builder.is_empty() => cut_off = true,
            added => added.map_err(|reason| Fault::new(lines.location(), reason))?,
        }
    }
    if recording.builder.is_empty() {
        return Err(Fault::file(Reason::NoEvents));
    }
    let builder = &mut recording.builder;
    builder.note_sizes(notes.failed, notes.largest_failed, "failed allocations, skipped");
    builder.note(notes.null, "allocations and frees of the null pointer, skipped");
    builder.note(notes.other_stream, "frees on another stream than the allocation's, replayed as uses on that stream");
    builder.note(notes.other_size, "frees of another size than the allocation's, replayed with the allocation's");
    recording.note("log");
    let mut program = recording.builder.finish().map_err(Fault::file)?;
    program.recorder = Recorder::Rmm;
    if cut_off {
        program.notes.push("the last line of the log is cut off, skipped".into());
    }
    Ok(program)
}

/// A decimal number, or a hexadecimal one after `0x`.
fn number(text: &str, field: &'static str) -> Result<u64, Reason> {
    let (digits, radix) = text.strip_prefix("0x").map_or((text, 10), |digits| (digits, 16));
    let number = if digits.starts_with('+') { None } else { u64::from_str_radix(digits, radix).ok() };
    number.ok_or_else(|| Reason::BadNumber { field, text: text.into() })
}

#[cfg(test)]
mod tests {
    use super::super::program::Event;
    use super::*;

    fn read(rows: &str) -> Result<Program, String> {
        let text = format!("Thread,Time,Action,Pointer,Size,Stream\n{rows}");
        let read = parse(text.as_bytes(), "log".into(), &Allowance::read(text.len(), text.len()));
        read.map_err(|fault| fault.at("l.csv".as_ref()).to_string())
    }

    #[test]
    fn reads_rows() {
        let program = read(
            "1,10:00:00.000001,allocate,0x7f0000000000,1024,0\n\
             1,10:00:00.000002,allocate failure,0x0,99999,0\n\
             2, 10:00:00.000003, free, 0x7f0000000000, 1024, 0x2\n\
             \n\
             2,10:00:00.000004,allocate,0x7f0000000000,8,0x2\n\
             2,10:00:00.000004,allocate,(nil),0,0\n",
        )
        .unwrap();
        assert_eq!(
            program.events,
            [
                Event::Alloc { slot: 0, bytes: 1024, stream: 0 },
                Event::RecordStream { slot: 0, stream: 1 },
                Event::Free { slot: 0 },
                Event::Alloc { slot: 0, bytes: 8, stream: 1 },
            ]
        );
        assert_eq!((program.streams.as_slice(), program.peak_requested_bytes), (&[0, 2][..], 1024));
        assert_eq!(program.notes.len(), 3);
        assert_eq!(program.notes[0], "failed allocations, skipped: 1; the largest: 99999 bytes");
        let failures = "1,t,allocate failure,0x0,8,0\n1,t,allocate failure,(nil),1000000000,0\n1,t,allocate,0x1,8,0";
        assert_eq!(read(failures).unwrap().notes, ["failed allocations, skipped: 2; the largest: 1000000000 bytes"]);
    }

    #[test]
    fn a_log_may_begin_later_than_the_program_and_have_gaps() {
        let program = read(
            "1,t,free,0x900,100,0\n\
             1,t,allocate,0x100,8,0\n\
             1,t,deallocate,0x800,50,0x3\n\
             1,t,free,0x800,50,0x3\n\
             1,t,allocate,0x100,9,0\n",
        )
        .unwrap();
        assert_eq!(
            program.events,
            [
                Event::Alloc { slot: 1, bytes: 50, stream: 1 },
                Event::Alloc { slot: 0, bytes: 100, stream: 0 },
                Event::Free { slot: 0 },
                Event::Alloc { slot: 0, bytes: 8, stream: 0 },
                Event::Free { slot: 1 },
                Event::Free { slot: 0 },
                Event::Alloc { slot: 0, bytes: 9, stream: 0 },
            ]
        );
        assert_eq!(program.peak_requested_bytes, 150);
        let notes = [
            "blocks that were allocated before the log begins",
            "blocks without a free in the log",
            "frees of blocks that are not allocated, skipped: 1",
        ];
        assert!(program.notes.iter().zip(notes).all(|(note, start)| note.starts_with(start)), "{:?}", program.notes);
        assert_eq!(program.notes.len(), 3);
    }

    #[test]
    fn the_last_line_may_be_cut_off() {
        let rows = "1,t,allocate,0x1,8,0\n1,t,allocate,0x2,8,0\n";
        for rest in ["1", "1,t,fr", "1,t,free,0x", "1,t,free,0x1,8", "1,t,free,0x1,8,", "1,t,free,0x1,8,0x"] {
            let program = read(&format!("{rows}{rest}")).unwrap();
            assert_eq!(
                (program.operations(), &*program.notes),
                (2, &["the last line of the log is cut off, skipped".into()][..])
            );
            assert!(read(&format!("{rows}{rest}\n")).is_err(), "{rest}");
        }
        assert_eq!(read(&format!("{rows}1,t,free,0x1,8,0")).unwrap().operations(), 3);
    }

    #[test]
    fn errors_name_line_and_reason() {
        for (rows, expected) in [
            ("", "l.csv: the file has no events, so there is nothing to replay"),
            ("1,t,allocate failure,0x0,8,0", "l.csv: the file has no events, so there is nothing to replay"),
            ("1,t,allocate,0x1,8", "l.csv:2: the field Stream is missing"),
            ("1,t,allocate,0x1,8,0,9", "l.csv:2: unexpected \"9\" at the end of the line"),
            (
                "1,t,steal,0x1,8,0",
                "l.csv:2: unknown kind \"steal\"; expected allocate, free, deallocate or allocate failure",
            ),
            ("1,t,allocate,0xg,8,0", "l.csv:2: \"0xg\" is not a valid Pointer"),
            ("1,t,allocate,0x1,-8,0", "l.csv:2: \"-8\" is not a valid Size"),
            ("1,t,allocate,0x1,8,1e30", "l.csv:2: \"1e30\" is not a valid Stream"),
        ] {
            assert_eq!(read(rows).unwrap_err(), expected);
        }
    }
}
