//! Tables for people.

use comfy_table::{Cell, CellAlignment, ContentArrangement, Table, presets};

/// A table whose first `texts` columns are text and whose others are numbers.
pub fn table(headings: &[&str], texts: usize) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(headings.iter().map(Cell::new));
    for column in table.column_iter_mut().skip(texts) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}
