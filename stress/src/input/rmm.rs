//! Logs of the RAPIDS Memory Manager: CSV with one row per allocation or free, joined by address.

use std::collections::HashSet;
use std::io::BufRead;

use super::error::{Block, Fault, Reason};
use super::lines::Lines;
use super::program::{Builder, Program};

/// The columns, in order.
pub(super) const HEADER: [&str; 6] = ["Thread", "Time", "Action", "Pointer", "Size", "Stream"];

/// What was skipped or assumed.
#[derive(Debug, Default)]
struct Tally {
    failed: u64,
    null: u64,
    other_stream: u64,
    other_size: u64,
    threads: HashSet<u64>,
}

/// Whether a line is the header.
pub(super) fn is_header(line: &str) -> bool {
    line.split(',').map(str::trim).eq(HEADER)
}

pub(super) fn parse(content: impl BufRead, name: String) -> Result<Program, Fault> {
    let mut builder = Builder::new(name, 0);
    let mut tally = Tally::default();
    let mut lines = Lines::new(content);
    while let Some(line) = lines.next()? {
        // Logs that were appended to one another repeat the header.
        if line.trim().is_empty() || is_header(line) {
            continue;
        }
        if let Err(reason) = row(line, &mut builder, &mut tally) {
            return Err(Fault::new(lines.location(), reason));
        }
    }
    builder.note(tally.failed, "failed allocation, skipped", "failed allocations, skipped");
    builder.note(
        tally.null,
        "allocation or free of the null pointer, skipped",
        "allocations and frees of the null pointer, skipped",
    );
    builder.note(
        tally.other_stream,
        "free on another stream than the allocation's, replayed as a use on that stream",
        "frees on another stream than the allocation's, replayed as a use on that stream",
    );
    builder.note(
        tally.other_size,
        "free of another size than the allocation's, replayed with the allocation's",
        "frees of another size than the allocation's, replayed with the allocation's",
    );
    if tally.threads.len() > 1 {
        builder.note(tally.threads.len() as u64, "", "threads replayed as one, in the order of the log");
    }
    if builder.is_empty() { Err(Fault::file(Reason::NoEvents)) } else { Ok(builder.finish()) }
}

fn row(line: &str, builder: &mut Builder, tally: &mut Tally) -> Result<(), Reason> {
    let mut fields = line.split(',').map(str::trim);
    let mut columns = [""; HEADER.len()];
    for (column, name) in columns.iter_mut().zip(HEADER) {
        *column = fields.next().ok_or(Reason::MissingField(name))?;
    }
    if let Some(field) = fields.next() {
        return Err(Reason::TrailingField(field.into()));
    }
    let [thread, _time, action, pointer, size, stream] = columns;
    if action == "allocate failure" {
        tally.failed += 1;
        return Ok(());
    }
    if !matches!(action, "allocate" | "free") {
        return Err(Reason::UnknownKind(action.into(), "allocate, free or allocate failure"));
    }
    tally.threads.insert(number(thread, "Thread")?);
    let pointer = if pointer == "(nil)" { 0 } else { number(pointer, "Pointer")? };
    let (size, stream) = (number(size, "Size")?, number(stream, "Stream")?);
    let block = Block::Address(pointer);
    if pointer == 0 {
        tally.null += 1;
    } else if action == "allocate" {
        if !builder.alloc(pointer, size, stream)? {
            return Err(Reason::AlreadyLive(block));
        }
    } else {
        let live = builder.live(pointer).ok_or(Reason::NotLive(block))?;
        tally.other_size += u64::from(live.bytes != size);
        if live.stream != stream {
            tally.other_stream += 1;
            builder.record_stream(pointer, stream)?;
        }
        builder.free(pointer)?;
    }
    Ok(())
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
        parse(text.as_bytes(), "log".into()).map_err(|fault| fault.at("l.csv".as_ref()).to_string())
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
        assert_eq!(program.notes.len(), 4);
        assert_eq!(program.notes[0], "1 failed allocation, skipped");
    }

    #[test]
    fn errors_name_line_and_reason() {
        for (rows, expected) in [
            ("", "l.csv: the file has no events, so there is nothing to replay"),
            ("1,t,allocate failure,0x0,8,0", "l.csv: the file has no events, so there is nothing to replay"),
            ("1,t,allocate,0x1,8", "l.csv:2: the field Stream is missing"),
            ("1,t,allocate,0x1,8,0,9", "l.csv:2: unexpected \"9\" at the end of the line"),
            ("1,t,steal,0x1,8,0", "l.csv:2: unknown kind \"steal\"; expected allocate, free or allocate failure"),
            ("1,t,allocate,0xg,8,0", "l.csv:2: \"0xg\" is not a valid Pointer"),
            ("1,t,allocate,0x1,-8,0", "l.csv:2: \"-8\" is not a valid Size"),
            ("1,t,free,0x1,8,0", "l.csv:2: address 0x1 is not allocated: it never was, or has been freed"),
            ("1,t,allocate,0x1,8,0\n1,t,allocate,0x1,8,0", "l.csv:3: address 0x1 is already allocated"),
        ] {
            assert_eq!(read(rows).unwrap_err(), expected);
        }
    }
}
