//! A map of the device's memory, drawn with characters.
//!
//! The map has the segments in the order of their addresses, then the rest of the device. A cell
//! summarises its share of the memory; an enlarged part shows single blocks.

use std::fmt::Write;
use std::io::IsTerminal;

use aquifer::{Allocator, Stream};
use aquifer_allocator::snapshot::BlockState;

use crate::exit::Failure;
use crate::table::terminal_columns;
use crate::text::{Bytes, wrap};

/// The use of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Use {
    /// In a live block.
    Live,
    /// Given back, but still in use by a stream.
    Waiting,
    /// Free in the cache.
    Free,
    /// Not taken from the device.
    Device,
    /// Held by others.
    Others,
}

/// A piece of memory with one use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its size.
    pub bytes: u64,
    /// Its use.
    pub is: Use,
    /// The number of its stream in the program.
    pub stream: u16,
    /// Whether a segment starts with it.
    pub starts: bool,
}

/// Sums over the memory that is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Figures {
    pub live: u64,
    pub free: u64,
    pub waiting: u64,
    /// The largest piece of free memory, and the bytes of the map before it.
    pub largest_free: u64,
    pub largest_free_at: u64,
    pub segments: u64,
}

/// The memory of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map {
    pieces: Vec<Piece>,
    total: u64,
}

/// The style of maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Style {
    /// The width of a line.
    pub width: usize,
    /// Whether only ASCII characters are used.
    pub ascii: bool,
    /// Whether the terminal shows colours.
    pub colour: bool,
}

/// Streams from this number on look alike in a row.
const STREAMS: usize = 5;

/// Rows of a map.
const ROWS: usize = 8;
/// Columns for the address at the start of a row, and for the frame.
const MARGIN: usize = 14;
/// The least width at which the legend is wrapped.
const LEGEND_MIN: usize = 40;

impl Style {
    /// The style for standard output. There are no colours if `NO_COLOR` is set. ASCII is used if
    /// `ascii` is set, or if the locale names an encoding other than UTF-8.
    pub fn of_stdout(ascii: bool) -> Style {
        let terminal = std::io::stdout().is_terminal();
        let columns = terminal_columns().unwrap_or(80);
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set);
        let is_utf8 = |locale: String| locale.to_lowercase().replace('-', "").contains("utf8");
        Style {
            width: columns.clamp(MARGIN + 16, MARGIN + 128),
            ascii: ascii || !locale.is_none_or(is_utf8),
            colour: terminal && set("NO_COLOR").is_none(),
        }
    }
}

/// The state of the memory of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Cell {
    Full,
    Mostly,
    Partly,
    Free,
    Waiting,
    Device,
    Others,
}

impl Cell {
    /// Of each state: its character, the same in ASCII, its colour and its meaning.
    const LOOKS: [(char, char, &str, &str); 7] = [
        ('█', '#', "32", "live"),
        ('▓', '+', "33", "half or more of it live"),
        ('▒', '-', "33", "less live"),
        ('░', '.', "31", "free in the cache"),
        ('≈', '~', "35", "given back, still in use by a stream"),
        ('·', '_', "2", "not taken from the device"),
        ('×', 'x', "34", "held by others"),
    ];

    fn character(self, ascii: bool) -> char {
        let (unicode, plain, ..) = Cell::LOOKS[self as usize];
        if ascii { plain } else { unicode }
    }

    /// The state of memory with these bytes of each use.
    fn of(sums: [u64; 5]) -> Cell {
        let [live, waiting, free, device, others] = sums;
        let held = live + waiting + free;
        match () {
            () if others > held && others > device => Cell::Others,
            () if device > held => Cell::Device,
            () if waiting > live.max(free) => Cell::Waiting,
            () if live + waiting == 0 => Cell::Free,
            () if free <= held / 16 => Cell::Full,
            () if free <= held / 2 => Cell::Mostly,
            () => Cell::Partly,
        }
    }
}

impl Map {
    /// The present memory of the allocator's device.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn of(allocator: &Allocator, streams: &[Stream]) -> Result<Map, Failure> {
        let memory = allocator.device().memory_info()?;
        let mut pieces = Vec::new();
        for segment in allocator.snapshot().segments {
            let stream = streams.iter().position(|stream| stream.id() == segment.stream).unwrap_or(0);
            for (index, block) in segment.blocks.iter().enumerate() {
                let is = match block.state {
                    BlockState::ActiveAllocated => Use::Live,
                    BlockState::ActivePendingFree => Use::Waiting,
                    _ => Use::Free,
                };
                let stream = u16::try_from(stream).unwrap_or(u16::MAX);
                pieces.push(Piece { bytes: block.size, is, stream, starts: index == 0 });
            }
        }
        let mapped: u64 = pieces.iter().map(|piece| piece.bytes).sum();
        // Granules without an address.
        let spare = allocator.memory_reserved().saturating_sub(mapped);
        if spare > 0 {
            pieces.push(Piece { bytes: spare, is: Use::Free, stream: 0, starts: true });
        }
        Ok(Map::new(pieces, memory.free, memory.total))
    }

    /// A map of these pieces of a device of `total` bytes, of which `free` are not taken.
    pub fn new(mut pieces: Vec<Piece>, free: u64, total: u64) -> Map {
        let reserved = pieces.iter().map(|piece| piece.bytes).sum();
        let others = total.saturating_sub(free).saturating_sub(reserved);
        for (bytes, is) in [(free, Use::Device), (others, Use::Others)] {
            pieces.push(Piece { bytes, is, stream: 0, starts: true });
        }
        Map { pieces, total }
    }

    /// The memory that is not taken from the device.
    pub fn free_on_device(&self) -> u64 {
        self.pieces.iter().filter(|piece| piece.is == Use::Device).map(|piece| piece.bytes).sum()
    }

    /// The map without memory that is not held.
    #[must_use]
    pub fn held_only(&self) -> Map {
        let pieces: Vec<Piece> = self.held().copied().collect();
        Map { total: pieces.iter().map(|piece| piece.bytes).sum(), pieces }
    }

    /// The pieces of the memory that is held.
    fn held(&self) -> impl Iterator<Item = &Piece> {
        self.pieces.iter().filter(|piece| !matches!(piece.is, Use::Device | Use::Others))
    }

    /// Sums over the memory that is held.
    pub fn figures(&self) -> Figures {
        let (mut figures, mut at) = (Figures::default(), 0);
        for piece in self.held() {
            figures.segments += u64::from(piece.starts);
            match piece.is {
                Use::Live => figures.live += piece.bytes,
                Use::Waiting => figures.waiting += piece.bytes,
                _ => {
                    figures.free += piece.bytes;
                    if piece.bytes > figures.largest_free {
                        (figures.largest_free, figures.largest_free_at) = (piece.bytes, at);
                    }
                }
            }
            at += piece.bytes;
        }
        figures
    }

    /// The bytes of segments of which nothing is in use, and the free pieces of the others.
    pub fn unused(&self) -> (u64, Vec<u64>) {
        let held: Vec<&Piece> = self.held().collect();
        let (mut unused, mut pieces) = (0, Vec::new());
        for segment in held.chunk_by(|_, next| !next.starts) {
            let free = segment.iter().filter(|piece| piece.is == Use::Free).map(|piece| piece.bytes);
            if segment.iter().all(|piece| piece.is == Use::Free) {
                unused += free.sum::<u64>();
            } else {
                pieces.extend(free);
            }
        }
        (unused, pieces)
    }

    /// The memory that is held, as a character for each `cell` bytes: `.` is free, `~` waits for a
    /// stream, `_` is not taken, and a letter is live. Its number from A on is four times the
    /// stream that has most there, at most `STREAMS`, plus 0 to 3 for the live part: up to a
    /// quarter, up to a half, less than 15 sixteenths, or more. Memory that is free on the device
    /// is not shown.
    pub fn row(&self, cell: u64, columns: usize) -> String {
        let mut row = String::with_capacity(columns);
        let mut pieces = self.held().copied();
        let mut piece = pieces.next();
        for _ in 0..columns {
            let (mut live, mut waiting, mut room) = ([0; STREAMS + 1], 0, cell);
            while let Some(at) = &mut piece
                && room > 0
            {
                let part = at.bytes.min(room);
                match at.is {
                    Use::Live => live[usize::from(at.stream).min(STREAMS)] += part,
                    Use::Waiting => waiting += part,
                    _ => {}
                }
                (at.bytes, room) = (at.bytes - part, room - part);
                if at.bytes == 0 {
                    piece = pieces.next();
                }
            }
            let (held, sum) = (cell - room, live.iter().sum::<u64>());
            let stream = (0..live.len()).rev().max_by_key(|&stream| live[stream]).unwrap_or(0);
            let level = match sum {
                _ if sum >= held - held / 16 => 3,
                _ if sum > held / 2 => 2,
                _ if sum > held / 4 => 1,
                _ => 0,
            };
            row.push(match () {
                () if held == 0 => '_',
                () if sum == 0 && waiting > 0 => '~',
                () if sum == 0 => '.',
                () => char::from(b'A' + u8::try_from(4 * stream).unwrap_or(0) + level),
            });
        }
        row
    }

    /// Draws rows of cells, an enlarged part, and a legend.
    pub fn draw(&self, style: Style) -> String {
        let columns = style.width.saturating_sub(MARGIN).max(1);
        let cell = self.total.div_ceil((ROWS * columns) as u64).max(1);
        let cells = self.cells(0, cell, ROWS * columns);
        let mut text = String::new();
        for (index, row) in cells.chunks(columns).enumerate() {
            let from = cell * (index * columns) as u64;
            line(&mut text, &Bytes(from).to_string(), row, style);
        }
        let mut shown = cells;
        if let Some((from, scale)) = self.part_to_enlarge(cell, columns) {
            let row = self.cells(from, scale, columns);
            let _ = writeln!(text, "A part of it, enlarged, {} a character:", Bytes(scale));
            line(&mut text, &Bytes(from).to_string(), &row, style);
            shown.extend(row);
        }
        let mut legend = format!("{} a character", Bytes(cell));
        shown.sort_unstable();
        shown.dedup();
        for cell in shown {
            let _ = write!(legend, "; {} {}", cell.character(style.ascii), Cell::LOOKS[cell as usize].3);
        }
        text + &wrap(&legend, style.width.max(LEGEND_MIN))
    }

    /// Cells of `cell` bytes each, from `from` on.
    fn cells(&self, from: u64, cell: u64, count: usize) -> Vec<Cell> {
        let mut sums = vec![[0; 5]; count];
        let (mut at, end) = (0, from + cell * count as u64);
        for piece in &self.pieces {
            let mut start = at.max(from);
            at += piece.bytes;
            while start < at.min(end) {
                let index = (start - from) / cell;
                let next = (from + (index + 1) * cell).min(at);
                if let Some(sums) = usize::try_from(index).ok().and_then(|index| sums.get_mut(index)) {
                    sums[piece.is as usize] += next - start;
                }
                start = next;
            }
        }
        sums.into_iter().filter(|sums| sums.iter().any(|&sum| sum > 0)).map(Cell::of).collect()
    }

    /// The part and the size of a cell that show most single blocks; `None` if the map shows as
    /// many.
    fn part_to_enlarge(&self, cell: u64, columns: usize) -> Option<(u64, u64)> {
        const PLACES: usize = 16;
        const CHANGES_LEAST: usize = 5;
        // Segments in which live and free memory meet.
        let mut places = Vec::new();
        let (mut at, mut start, mut end) = (0, 0, None);
        for pair in self.pieces.windows(2) {
            if pair[0].starts {
                start = at;
            }
            at += pair[0].bytes;
            if !pair[1].starts && pair[0].is != pair[1].is && end != Some(start) {
                places.push(start);
                end = Some(start);
            }
        }
        let step = places.len().div_ceil(PLACES).max(1);
        let scales = [4, 16, 64, 256].map(|part| 1 << (cell / part).max(1).ilog2());
        let tried = places.into_iter().step_by(step).flat_map(|from| scales.map(|scale| (from, scale)));
        let changes = |(from, scale): (u64, u64)| {
            let cells = self.cells(from, scale, columns);
            cells.windows(2).filter(|pair| pair[0] != pair[1]).count()
        };
        let counted = tried.map(|part| (changes(part), part)).filter(|(count, _)| *count >= CHANGES_LEAST);
        // The first of equals, which is the coarsest.
        counted.rev().max_by_key(|(count, _)| *count).map(|(_, part)| part)
    }
}

fn line(text: &mut String, label: &str, cells: &[Cell], style: Style) {
    let frame = if style.ascii { '|' } else { '▏' };
    let _ = write!(text, "{label:>10} {frame}");
    for run in cells.chunk_by(|one, other| one == other) {
        let (cell, count) = (run[0], run.len());
        let run: String = std::iter::repeat_n(cell.character(style.ascii), count).collect();
        let _ = if style.colour {
            write!(text, "\x1b[{}m{run}\x1b[0m", Cell::LOOKS[cell as usize].2)
        } else {
            write!(text, "{run}")
        };
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Style = Style { width: MARGIN + 10, ascii: true, colour: false };

    fn map(pieces: &[(u64, Use)], total: u64) -> Map {
        let pieces = pieces.iter().enumerate();
        let pieces: Vec<Piece> =
            pieces.map(|(index, &(bytes, is))| Piece { bytes, is, stream: 0, starts: index % 100 == 0 }).collect();
        Map { pieces, total }
    }

    #[test]
    fn every_use_has_a_character() {
        let all = [(80, Use::Live), (80, Use::Free), (80, Use::Waiting), (400, Use::Device), (160, Use::Others)];
        let text = map(&all, 800).draw(PLAIN);
        let rows: Vec<&str> = text.lines().map(|line| line.split('|').next_back().unwrap_or("")).collect();
        assert_eq!(rows[0], "########..");
        assert_eq!(rows[1], "......~~~~");
        assert_eq!(rows[2], "~~~~______");
        assert_eq!(rows[7], "xxxxxxxxxx");
        assert!(text.replace('\n', " ").ends_with(
            "10 bytes a character; # live; . free in the cache; ~ given back, still in use by a stream; _ not taken \
             from the device; x held by others"
        ));
        assert!(text.lines().all(|line| line.len() <= LEGEND_MIN), "{text}");
    }

    #[test]
    fn mixed_cells_show_how_much_is_live_and_are_enlarged() {
        let pieces: Vec<_> = (0..400).map(|i| (32, if i % 4 == 0 { Use::Live } else { Use::Free })).collect();
        let text = map(&pieces, 32 * 400).draw(PLAIN);
        assert_eq!(text.lines().next(), Some("   0 bytes |----------"), "{text}");
        assert!(text.contains("enlarged, 32 bytes a character:\n"), "{text}");
        assert!(text.contains("|#...#...#."), "{text}");
    }

    #[test]
    fn a_row_tells_streams_and_how_much_is_live() {
        let piece = |bytes, is, stream, starts| Piece { bytes, is, stream, starts };
        let map = Map::new(
            vec![
                piece(20, Use::Live, 0, true),
                piece(3, Use::Live, 1, true),
                piece(17, Use::Free, 1, false),
                piece(5, Use::Live, 9, true),
                piece(7, Use::Waiting, 9, false),
                piece(4, Use::Waiting, 9, false),
            ],
            40,
            100,
        );
        // Full; less than a half and nothing of stream 1; half of stream 9, waiting; a last part.
        assert_eq!(map.row(10, 8), "DDF.V~__");
        let figures = Figures { live: 28, free: 17, waiting: 11, largest_free: 17, largest_free_at: 23, segments: 3 };
        assert_eq!(map.figures(), figures);
        assert_eq!(Map::new(Vec::new(), 0, 0).row(10, 2), "__");
    }

    #[test]
    fn tiny_devices_are_drawn() {
        for total in [0, 1, 7] {
            assert!(map(&[(total, Use::Device)], total).draw(PLAIN).contains("a character"));
        }
    }
}
