//! A map of the device's memory, drawn with characters.
//!
//! The map has the segments in the order of their addresses, then the rest of the device. A cell
//! summarises its share of the memory; an enlarged part shows single blocks.

use std::fmt::Write;
use std::io::IsTerminal;

use aquifer_trace::Map;

use crate::table::terminal_columns;
use crate::text::{Bytes, wrap};

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

impl Style {
    /// Draws rows of cells, an enlarged part, and a legend.
    pub fn draw(self, map: &Map) -> String {
        let style = self;
        let columns = style.width.saturating_sub(MARGIN).max(1);
        let cell = map.total.div_ceil((ROWS * columns) as u64).max(1);
        let mut shown = cells(map, 0, cell, ROWS * columns);
        let mut text = String::new();
        for (index, row) in shown.chunks(columns).enumerate() {
            let from = cell * (index * columns) as u64;
            line(&mut text, &Bytes(from).to_string(), row, style);
        }
        if let Some((from, scale)) = part_to_enlarge(map, cell, columns) {
            let row = cells(map, from, scale, columns);
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
}

/// Cells of `cell` bytes each, from `from` on.
fn cells(map: &Map, from: u64, cell: u64, count: usize) -> Vec<Cell> {
    let mut sums = vec![[0; 5]; count];
    let (mut at, end) = (0, from + cell * count as u64);
    for piece in &map.pieces {
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
fn part_to_enlarge(map: &Map, cell: u64, columns: usize) -> Option<(u64, u64)> {
    const PLACES: usize = 16;
    const CHANGES_LEAST: usize = 5;
    // Segments in which live and free memory meet.
    let mut places = Vec::new();
    let (mut at, mut start, mut end) = (0, 0, None);
    for pair in map.pieces.windows(2) {
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
        let cells = cells(map, from, scale, columns);
        cells.windows(2).filter(|pair| pair[0] != pair[1]).count()
    };
    let counted = tried.map(|part| (changes(part), part)).filter(|(count, _)| *count >= CHANGES_LEAST);
    // The first of equals, which is the coarsest.
    counted.rev().max_by_key(|(count, _)| *count).map(|(_, part)| part)
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
    use aquifer_trace::{Piece, Use};

    use super::*;

    const PLAIN: Style = Style { width: MARGIN + 10, ascii: true, colour: false };

    fn map(pieces: &[(u64, Use)], total: u64) -> Map {
        let pieces = pieces.iter().enumerate();
        let pieces: Vec<Piece> = pieces
            .map(|(index, &(bytes, is))| Piece { bytes, is, stream: 0, starts: index % 100 == 0, movable: 0 })
            .collect();
        Map { pieces, total }
    }

    #[test]
    fn every_use_has_a_character() {
        let all = [(80, Use::Live), (80, Use::Free), (80, Use::Waiting), (400, Use::Device), (160, Use::Others)];
        let text = PLAIN.draw(&map(&all, 800));
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
        let text = PLAIN.draw(&map(&pieces, 32 * 400));
        assert_eq!(text.lines().next(), Some("   0 bytes |----------"), "{text}");
        assert!(text.contains("enlarged, 32 bytes a character:\n"), "{text}");
        assert!(text.contains("|#...#...#."), "{text}");
    }

    #[test]
    fn tiny_devices_are_drawn() {
        for total in [0, 1, 7] {
            assert!(PLAIN.draw(&map(&[(total, Use::Device)], total)).contains("a character"));
        }
    }
}
