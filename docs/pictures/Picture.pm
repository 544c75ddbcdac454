# Shapes, colours and SVG files, for the scripts that draw pictures.
#
# Pages are light or dark, so each picture has its own ground, and each colour
# is a class with two values.

package Picture;

use strict;
use warnings FATAL => 'all';

use Exporter qw(import);

our @EXPORT = qw(text box bar arrow line dashed shape escaped as_svg
  write_picture);

# class => property, light, dark
my %colours = (
	ink => [ 'fill', '#1f2328', '#e6edf3' ],
	soft => [ 'fill', '#59636e', '#9aa4af' ],
	lost => [ 'fill', '#c53030', '#ff7b72' ],
	good => [ 'fill', '#1a7f37', '#56d364' ],
	ground => [ 'fill', '#ffffff', '#0d1117' ],
	area => [ 'fill', '#f3f5f8', '#161b22' ],
	wait => [ 'fill', '#fdebc8', '#5c4813' ],
	hold => [ 'fill', '#cdebd3', '#1d5230' ],
	gone => [ 'fill', '#e4e7eb', '#30363d' ],
	end => [ 'fill', '#f8d7da', '#6b2329' ],
	wal => [ 'fill', '#d3e3fd', '#1b3a66' ],
	disk => [ 'fill', '#9fc0f5', '#2a5aa8' ],
	own => [ 'fill', '#1f6fc4', '#58a6ff' ],
	other => [ 'fill', '#b4bcc6', '#4d5662' ],
	edge => [ 'stroke', '#829ab1', '#6e7f91' ],
	grid => [ 'stroke', '#d5dbe1', '#30363d' ],
	dark => [ 'stroke', '#52606d', '#9aa4af' ],
	cross => [ 'stroke', '#c53030', '#ff7b72' ],
	alice => [ 'fill', '#1a7f37', '#56d364' ],
	bob => [ 'fill', '#1f6fc4', '#58a6ff' ],
	carol => [ 'fill', '#7a5cc4', '#b799ff' ],
	admin => [ 'fill', '#8a7400', '#e3c94d' ],
	locks => [ 'stroke', '#1f6fc4', '#58a6ff' ],
	queue => [ 'stroke', '#0b8a6a', '#3fcf9f' ],
	lease_queue => [ 'stroke', '#7a5cc4', '#b799ff' ],
	tickets => [ 'stroke', '#c05621', '#ffa657' ],
	leases => [ 'stroke', '#8a7400', '#e3c94d' ],
	lease_locks => [ 'stroke', '#c2255c', '#ff7eb0' ]);

my @shapes;

sub escaped
{
	my ($text) = @_;

	$text =~ s/&/&amp;/g;
	$text =~ s/</&lt;/g;
	$text =~ s/>/&gt;/g;
	$text =~ s/"/&quot;/g;
	$text =~ s/[\x00-\x1f]/ /g;
	return $text;
}

# shape($format, ...): append SVG
sub shape
{
	my ($format, @values) = @_;

	push @shapes, sprintf $format, @values;
	return;
}

# text($x, $y, $text, %options): the first line at $y, others below it
sub text
{
	my ($x, $y, $text, %options) = @_;
	my $size = $options{size} // 13;

	foreach my $line (split /\n/, $text)
	{
		shape(
			'<text x="%d" y="%d" font-size="%d" text-anchor="%s" class="%s"%s>%s</text>',
			$x, $y, $size,
			$options{anchor} // 'middle', $options{colour} // 'ink',
			$options{bold} ? ' font-weight="bold"' : '', escaped($line));
		$y += $size + 4;
	}
	return;
}

# box($x, $y, $width, $height, $colour, $title, $text)
sub box
{
	my ($x, $y, $width, $height, $fill, $title, $text) = @_;
	my $lines = defined $text ? 1 + ($text =~ tr/\n//) : 0;
	my $top = $y + ($height - 17 * $lines) / 2 + 5;

	shape(
		'<rect x="%d" y="%d" width="%d" height="%d" rx="8" class="%s edge"/>',
		$x, $y, $width, $height, $fill);
	text($x + $width / 2, $top, $title, bold => 1, size => 15);
	text($x + $width / 2, $top + 18, $text) if $lines;
	return;
}

# bar($x1, $x2, $y, $colour, $text)
sub bar
{
	my ($x1, $x2, $y, $fill, $text) = @_;

	shape(
		'<rect x="%d" y="%d" width="%d" height="30" class="%s edge"/>',
		$x1, $y, $x2 - $x1, $fill);
	text(($x1 + $x2) / 2, $y + 20, $text) if defined $text;
	return;
}

# arrow(@points): from the first point to the last, with a head
sub arrow
{
	my (@points) = @_;
	my @pairs;

	push @pairs, sprintf '%d,%d', splice @points, 0, 2 while @points;
	shape('<polyline points="%s" class="dark" stroke-width="1.5"'
		  . ' marker-end="url(#head)"/>', join ' ', @pairs);
	return;
}

# line($x1, $y1, $x2, $y2, $class)
sub line
{
	my ($x1, $y1, $x2, $y2, $class) = @_;

	shape('<line x1="%d" y1="%d" x2="%d" y2="%d" class="%s"/>',
		$x1, $y1, $x2, $y2, $class // 'grid');
	return;
}

sub dashed
{
	my ($x, $y1, $y2) = @_;

	shape(
		'<line x1="%d" y1="%d" x2="%d" y2="%d" class="edge"'
		  . ' stroke-dasharray="4 4"/>',
		$x, $y1, $x, $y2);
	return;
}

sub rules
{
	my ($which, $used) = @_;

	return join '', map { ".$_\{$colours{$_}[0]:$colours{$_}[$which]}" }
	  grep { $used =~ /\b$_\b/ } sort keys %colours;
}

# as_svg($width, $height, $title, $css): the SVG of all shapes drawn since the
# last call.  $css has more rules.
sub as_svg
{
	my ($width, $height, $title, $css) = @_;
	my $shapes = join '', map { "$_\n" } @shapes;
	my $used = join ' ', 'ground', ($shapes =~ /class="([^"]*)"/g);
	my $head = '';

	if ($shapes =~ /url\(#head\)/)
	{
		$used .= ' soft';
		$head = '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5"'
		  . ' markerWidth="8" markerHeight="8" orient="auto">'
		  . '<path d="M0,0 L10,5 L0,10 z" class="soft"/></marker></defs>' . "\n";
	}
	my ($light, $dark) = (rules(1, $used), rules(2, $used));
	$title = escaped($title);
	$css //= '';
	@shapes = ();
	return <<"END_OF_SVG";
<svg xmlns="http://www.w3.org/2000/svg" width="$width" height="$height" viewBox="0 0 $width $height" font-family="Helvetica, Arial, sans-serif">
<title>$title</title>
<style>
polyline{fill:none}
$light
\@media (prefers-color-scheme:dark){$dark}
$css</style>
$head<rect width="$width" height="$height" rx="6" class="ground"/>
$shapes</svg>
END_OF_SVG
}

# write_picture($file, $width, $height, $title, $css)
sub write_picture
{
	my ($file, @what) = @_;

	open my $out, '>', $file or die "could not open $file: $!\n";
	print $out as_svg(@what);
	close $out or die "could not write $file: $!\n";
	return;
}

1;
