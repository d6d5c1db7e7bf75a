//! Logs of the RAPIDS Memory Manager: CSV with one row per allocation or free, joined by address.

use std::collections::{BTreeMap, HashSet};
use std::io::BufRead;

use super::allowance::{Allowance, EVENTS};
use super::arena::{START, digest, whole};
use super::error::{Fault, Reason};
use super::lines::Lines;
use super::program::{Builder, Program};
use super::recording::Recording;

/// The columns of a log without a header, in order.
pub(super) const HEADER: [&str; 6] = ["Thread", "Time", "Action", "Pointer", "Size", "Stream"];

/// The actions of the rows.
const ACTIONS: &str = "allocate, free, deallocate or allocate failure";

/// The columns of the fields. Old versions had other ones, and more.
struct Columns {
    thread: Option<usize>,
    device: Option<usize>,
    action: usize,
    pointer: usize,
    size: usize,
    stream: Option<usize>,
    count: usize,
}

impl Columns {
    /// The columns that a header names; `None` if the line is not a header.
    fn of(header: &str) -> Option<Self> {
        // Most lines are rows, which begin with a number.
        if header.starts_with(|char: char| char.is_ascii_digit()) || !header.contains(',') {
            return None;
        }
        let names: Vec<String> =
            header.split(',').map(|name| name.trim().trim_matches('"').to_ascii_lowercase()).collect();
        let find = |known: &[&str]| names.iter().position(|name| known.contains(&&**name));
        Some(Self {
            thread: find(&["thread"]),
            device: find(&["device id"]),
            action: find(&["action", "event type"])?,
            pointer: find(&["pointer", "address"])?,
            size: find(&["size", "size (bytes)"])?,
            stream: find(&["stream"]),
            count: names.len(),
        })
    }

    fn usual() -> Self {
        let (thread, stream) = (Some(0), Some(5));
        Self { thread, device: None, action: 2, pointer: 3, size: 4, stream, count: HEADER.len() }
    }

    fn row<'a>(&self, line: &'a str) -> Result<Row<'a>, Reason> {
        if !line.contains(',') {
            return Err(Reason::MissingField(HEADER[1]));
        }
        let fields: Vec<&str> = line.split(',').map(|field| field.trim().trim_matches('"')).collect();
        if fields.len() < self.count {
            let missing = HEADER.get(fields.len()).filter(|_| self.count == HEADER.len());
            return Err(Reason::MissingField(missing.unwrap_or(&"of the last column")));
        }
        // The last column of old logs is a path, which may contain commas.
        if let Some(&field) = fields.get(self.count)
            && self.count <= HEADER.len()
        {
            return Err(Reason::TrailingField(field.into()));
        }
        let field = |column: Option<usize>| column.map(|column| fields[column]);
        Ok(Row {
            thread: field(self.thread),
            device: field(self.device),
            action: fields[self.action],
            pointer: fields[self.pointer],
            size: fields[self.size],
            stream: field(self.stream),
        })
    }
}

struct Row<'a> {
    thread: Option<&'a str>,
    device: Option<&'a str>,
    action: &'a str,
    pointer: &'a str,
    size: &'a str,
    stream: Option<&'a str>,
}

/// Whether a line is a header.
pub(super) fn is_header(line: &str) -> bool {
    Columns::of(line).is_some()
}

/// Whether a line is a row of a log without a header.
pub(super) fn is_row(line: &str) -> bool {
    Columns::usual().row(line).is_ok_and(|row| kind(row.action).is_some() && pointer(row.pointer).is_ok())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Allocate,
    Free,
    Failure,
}

fn kind(action: &str) -> Option<Kind> {
    match action {
        "allocate" | "Alloc" => Some(Kind::Allocate),
        "free" | "deallocate" | "Free" => Some(Kind::Free),
        "allocate failure" => Some(Kind::Failure),
        _ => None,
    }
}

/// The events of one device.
struct Device {
    recording: Recording,
    failed: u64,
    largest_failed: Option<u64>,
    null: u64,
    unknown_size: u64,
    other_stream: u64,
    other_size: u64,
    threads: HashSet<u64>,
}

impl Device {
    fn new(name: &str, number: u32) -> Self {
        Self {
            recording: Recording::new(Builder::new(name.to_owned(), number)),
            failed: 0,
            largest_failed: None,
            null: 0,
            unknown_size: 0,
            other_stream: 0,
            other_size: 0,
            threads: HashSet::new(),
        }
    }

    /// Memory in use.
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.recording.bytes() + self.threads.capacity() * 9
    }

    fn add(&mut self, row: &Row<'_>) -> Result<(), Reason> {
        let Some(kind) = kind(row.action) else { return Err(Reason::UnknownKind(row.action.into(), ACTIONS)) };
        if kind == Kind::Failure {
            self.failed += 1;
            self.largest_failed = self.largest_failed.max(number(row.size, "Size").ok());
            return Ok(());
        }
        self.threads.extend(row.thread.map(|thread| digest(START, thread.as_bytes())));
        let (pointer, size) = (pointer(row.pointer)?, number(row.size, "Size")?);
        let stream = row.stream.map_or(Ok(0), |stream| number(stream, "Stream"))?;
        if pointer == 0 {
            self.null += 1;
        } else if kind == Kind::Allocate {
            self.recording.alloc(pointer, size, stream)?;
        } else if size == 0 && !self.recording.is_live(Some(pointer)) {
            // Old logs have no sizes for frees.
            self.unknown_size += 1;
        } else if let Some(live) = self.recording.freed(pointer, size, stream)? {
            self.other_size += u64::from(live.bytes != size && size != 0);
            if live.stream != stream {
                self.other_stream += 1;
                self.recording.builder.record_stream(pointer, stream)?;
            }
            self.recording.free(pointer)?;
        }
        Ok(())
    }

    fn finish(mut self, other_lines: u64) -> Result<Program, Reason> {
        let builder = &mut self.recording.builder;
        builder.note_sizes(self.failed, self.largest_failed, "failed allocations, skipped");
        builder.note(self.null, "allocations and frees of the null pointer, skipped");
        builder.note(self.unknown_size, "frees without a size of blocks that are not allocated, skipped");
        builder
            .note(self.other_stream, "frees on another stream than the allocation's, replayed as uses on that stream");
        builder.note(self.other_size, "frees of another size than the allocation's, replayed with the allocation's");
        builder.note(other_lines, "lines that are not rows of the log, skipped");
        if self.threads.len() > 1 {
            builder.note(self.threads.len() as u64, "threads replayed as one, in the order of the log");
        }
        self.recording.note("log");
        self.recording.builder.finish()
    }
}

pub(super) fn parse(content: impl BufRead, name: &str, allowance: &Allowance) -> Result<Vec<Program>, Fault> {
    let mut devices: BTreeMap<u32, Device> = BTreeMap::new();
    let mut lines = Lines::new(content);
    let (mut columns, mut taken, mut other_lines, mut cut_off) = (None, 0, 0, false);
    // There may be lines of other programs between the rows, unless the log begins with its header.
    let mut alone = None;
    while let Some(line) = lines.next()? {
        if line.trim().is_empty() {
            continue;
        }
        // Logs that were appended to one another repeat the header.
        if let Some(header) = Columns::of(line) {
            alone.get_or_insert(true);
            columns = Some(header);
            continue;
        }
        let alone = *alone.get_or_insert(false);
        let columns = columns.get_or_insert_with(Columns::usual);
        let row = match columns.row(line) {
            Ok(row) if alone || kind(row.action).is_some() => Ok(row),
            Err(reason) if alone => Err(reason),
            _ => {
                other_lines += 1;
                continue;
            }
        };
        let mut add = |row: Row<'_>| {
            let number = row.device.map_or(Ok(0), |device| number(device, "Device ID"))?;
            let number = u32::try_from(number).map_err(|_| Reason::TooMany("2^32 devices"))?;
            let device = devices.entry(number).or_insert_with(|| Device::new(name, number));
            let before = device.bytes();
            device.add(&row)?;
            taken = (taken + device.bytes()).saturating_sub(before);
            allowance.check(taken, EVENTS)
        };
        match row.and_then(&mut add) {
            Err(reason) if !devices.is_empty() && !lines.ended() && is_cut_off(&reason) => cut_off = true,
            added => added.map_err(|reason| Fault::new(lines.location(), reason))?,
        }
    }
    devices.retain(|_, device| !device.recording.builder.is_empty());
    let several = devices.len() > 1;
    let mut programs = Vec::new();
    for (number, device) in devices {
        let mut program = device.finish(other_lines).map_err(Fault::file)?;
        if cut_off {
            program.notes.push("the last line of the log is cut off, skipped".into());
        }
        if several {
            program.name += &format!("/device{number}");
        }
        programs.push(program);
    }
    if programs.is_empty() { Err(Fault::file(Reason::NoEvents)) } else { Ok(programs) }
}

/// Whether a row that was cut off has this fault.
fn is_cut_off(reason: &Reason) -> bool {
    match reason {
        Reason::MissingField(_) => true,
        Reason::BadNumber { text, .. } => matches!(&**text, "" | "0x"),
        _ => false,
    }
}

fn pointer(text: &str) -> Result<u64, Reason> {
    if text == "(nil)" { Ok(0) } else { number(text, "Pointer") }
}

/// A decimal number, which may have a zero fraction, or a hexadecimal one after `0x`.
fn number(text: &str, field: &'static str) -> Result<u64, Reason> {
    let (digits, radix) = text.strip_prefix("0x").map_or((text, 10), |digits| (digits, 16));
    let integer = if digits.starts_with('+') { None } else { u64::from_str_radix(digits, radix).ok() };
    let float = || {
        let is_number = text.starts_with(|char: char| char.is_ascii_digit());
        let number = is_number.then(|| text.parse().ok()).flatten().and_then(whole)?;
        u64::try_from(number).ok()
    };
    integer.or_else(float).ok_or_else(|| Reason::BadNumber { field, text: text.into() })
}

#[cfg(test)]
mod tests {
    use super::super::program::Event;
    use super::*;

    fn read_all(text: &str) -> Result<Vec<Program>, String> {
        let read = parse(text.as_bytes(), "log", &Allowance::read(text.len(), text.len()));
        read.map_err(|fault| fault.at("l.csv".as_ref()).to_string())
    }

    fn read(rows: &str) -> Result<Program, String> {
        read_all(&format!("Thread,Time,Action,Pointer,Size,Stream\n{rows}")).map(|mut programs| programs.remove(0))
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
        assert_eq!(program.notes[0], "failed allocations, skipped: 1; the largest: 99999 bytes");
        let failures = "1,t,allocate failure,0x0,8,0\n1,t,allocate failure,(nil),1e9,0\n1,t,allocate,0x1,8,0";
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
    fn columns_are_found_by_their_names() {
        let read = |text: &str| {
            let programs = read_all(text).unwrap();
            programs
                .into_iter()
                .map(|program| (program.name, program.device, program.events.len(), program.peak_requested_bytes))
                .collect::<Vec<_>>()
        };
        let one = [("log".to_owned(), 0, 2, 1024)];
        assert_eq!(read("Time,Action,Pointer,Size,Stream\nt,allocate,0x1,1024,0\nt,free,0x1,1024,0"), one);
        // As pandas writes them.
        assert_eq!(
            read(",Thread,Time,Action,Pointer,Size,Stream\n0,1.0,NaN,allocate,0x1,1024.0,0.0\n1,,,free,0x1,1.024e3,0"),
            one
        );
        assert_eq!(
            read("\"Action\",\"Pointer\",\"Size\"\n\"allocate\",\"0x1\",\"1024\"\n\"free\",\"0x1\",\"1024\""),
            one
        );
        let old = "Event Type,Device ID,Address,Stream,Size (bytes),Free Memory,Total Memory,Current Allocs,Start,End,Elapsed,Location";
        let rows = "Alloc,0,0x7fae06600000,0,80,0,0,1,1.10549,1.1074,0.00191666,/a,b/driver.py:683\n\
                    Alloc,2,0x7fae06600000,0,90,0,0,1,1.10549,1.1074,0.00191666,/a/driver.py:683\n\
                    Free,0,0x7fae06600000,0,0,0,0,0,1.10798,1.10921,0.00122238,/a/utils.py:678\n\
                    Free,0,0x7fae06700000,0,0,0,0,0,1.10798,1.10921,0.00122238,/a/utils.py:678";
        assert_eq!(
            read(&format!("{old}\n{rows}")),
            [("log/device0".into(), 0, 2, 80), ("log/device2".into(), 2, 1, 90)]
        );
        let notes = &read_all(&format!("{old}\n{rows}")).unwrap()[0].notes;
        assert_eq!(*notes, ["frees without a size of blocks that are not allocated, skipped: 1"]);
    }

    #[test]
    fn a_log_without_a_header_may_stand_between_other_lines() {
        let text = "26/11/26 10:00:00 INFO Executor: started, with a, comma, or, three\n\
                    1979932,14:21:19.998533,allocate,0x30a000000,256,0x2\n\
                    26/11/26 10:00:01 INFO Executor: done\n\
                    1980043,14:21:32.661875,free,0x30a000000,256,0x2\n";
        let programs = read_all(text).unwrap();
        assert_eq!((programs[0].operations(), programs[0].peak_requested_bytes), (2, 256));
        assert_eq!(
            programs[0].notes,
            ["lines that are not rows of the log, skipped: 2", "threads replayed as one, in the order of the log: 2"]
        );
        assert!(
            is_row("1,t,allocate failure,(nil),256,0x2") && !is_row("1,t,steal,0x1,256,0") && !is_row("1,t,free,x,1,0")
        );
        let broken = "1,t,allocate,0x1,many,0";
        assert_eq!(read_all(broken).unwrap_err(), "l.csv:1: \"many\" is not a valid Size");
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
        assert!(read(&format!("{rows}1,t,steal,0x1,8,0")).is_err());
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
            ("1,t,allocate,0x1,8.5,0", "l.csv:2: \"8.5\" is not a valid Size"),
            ("1,t,allocate,0x1,NaN,0", "l.csv:2: \"NaN\" is not a valid Size"),
            ("1,t,allocate,0x1,8,1e30", "l.csv:2: \"1e30\" is not a valid Stream"),
        ] {
            assert_eq!(read(rows).unwrap_err(), expected);
        }
    }
}
