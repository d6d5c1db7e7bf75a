//! Rows of results. Each is declared once: its JSON keys, their help, and the columns of its table.

use serde::Serialize;

use crate::table::Table;

/// A row of results, as [`row!`] declares it.
pub(crate) trait Row: Serialize {
    /// The doc comment of the row, line by line.
    const ABOUT: &'static [&'static str];

    /// The JSON keys in their order, each with its help.
    fn keys() -> Vec<(&'static str, &'static str)>;

    /// The headings and cells of the table, in the order of its columns.
    fn cells(&self) -> Vec<(&'static str, String)>;

    /// The table of some rows.
    fn table(rows: &[Self]) -> Table
    where
        Self: Sized,
    {
        Table::new(rows.iter().map(Row::cells).collect())
    }

    /// The help: what the row is, and its keys.
    fn help() -> String {
        let about = Self::ABOUT.join("\n");
        let paragraphs = about.split("\n\n").map(|lines| lines.replace('\n', "").trim().to_owned());
        let keys = Self::keys().into_iter().map(|(key, what)| format!("\n  {key:<24}  {}", what.trim()));
        format!("{}:{}", paragraphs.collect::<Vec<_>>().join("\n\n"), keys.collect::<String>())
    }
}

/// A row that may be missing, with its keys.
impl<R: Row> Row for Option<R> {
    const ABOUT: &'static [&'static str] = R::ABOUT;

    fn keys() -> Vec<(&'static str, &'static str)> {
        R::keys()
    }

    fn cells(&self) -> Vec<(&'static str, String)> {
        self.as_ref().map(Row::cells).unwrap_or_default()
    }
}

/// Declares a row. Its doc comment begins its help, and those of its fields explain the JSON keys,
/// which are in the order of the fields.
///
/// `=> ["holds", bytes]` after a field makes it a column of the table: its heading, and how the value
/// is shown. Without the latter it is shown as it is; with `|row|`, the cell is made of the row.
///
/// A field with `#[serde(flatten)]` is a row, whose keys and columns stand in its place. One with
/// `#[serde(skip)]` is no JSON key.
macro_rules! row {
    (
        $(#[doc = $about:literal])+
        $(#[derive($($derive:ident),+)])?
        $vis:vis struct $name:ident {
            $(
                $(#[doc = $help:literal])*
                $(#[serde($serde:ident)])?
                $key_vis:vis $key:ident: $type:ty $(=> $column:tt)*,
            )+
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, serde::Serialize $($(, $derive)+)?)]
        $vis struct $name {
            $($(#[doc = $help])* $(#[serde($serde)])? $key_vis $key: $type,)+
        }

        impl $crate::row::Row for $name {
            const ABOUT: &'static [&'static str] = &[$($about),+];

            fn keys() -> Vec<(&'static str, &'static str)> {
                [$($crate::row::keys!($key $type [$($help)*] $($serde)?)),+].concat()
            }

            fn cells(&self) -> Vec<(&'static str, String)> {
                [$($crate::row::cells!(self $key $($serde)? $($column)*)),+].concat()
            }
        }
    };
}

/// The keys of a field of [`row!`].
macro_rules! keys {
    ($key:ident $type:ty [$($help:literal)*] flatten) => { <$type as $crate::row::Row>::keys() };
    ($key:ident $type:ty [$($help:literal)*] skip) => { Vec::new() };
    ($key:ident $type:ty [$($help:literal)+]) => { vec![(stringify!($key), concat!($($help),+))] };
}

/// The headings and cells of a field of [`row!`].
macro_rules! cells {
    ($row:ident $key:ident flatten) => { $crate::row::Row::cells(&$row.$key) };
    ($row:ident $key:ident skip $($column:tt)*) => { $crate::row::cells!($row $key $($column)*) };
    ($row:ident $key:ident $([$heading:literal $($cell:tt)*])*) => {
        vec![$(($heading, $crate::row::cell!($row $key $($cell)*).to_string())),*]
    };
}

/// The cell of a column of [`row!`].
macro_rules! cell {
    ($row:ident $key:ident) => {
        &$row.$key
    };
    ($row:ident $key:ident , $unit:ident) => {
        $unit($row.$key)
    };
    ($row:ident $key:ident , |$it:ident| $cell:expr) => {{
        let $it = $row;
        $cell
    }};
}

pub(crate) use {cell, cells, keys, row};
