//! The stress program as a library.
