//! Request generators and trace readers.
